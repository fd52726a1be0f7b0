"""Models: messages, and the adapters against strict servers on loopback."""
