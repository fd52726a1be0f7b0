"""The adapters against servers that speak the providers' APIs strictly."""
