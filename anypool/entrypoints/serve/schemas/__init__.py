"""What the server takes and gives, as pydantic models."""
