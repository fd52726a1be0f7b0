"""The journals, which make logs durable, and the operations on them."""
