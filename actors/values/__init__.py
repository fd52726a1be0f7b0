"""Plain values of events and requests: frozen JSON, text, names for APIs, upcasters."""
