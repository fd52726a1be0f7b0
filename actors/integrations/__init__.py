"""Adapters that let other frameworks keep their conversations here."""
