"""The parts that the journals share."""
