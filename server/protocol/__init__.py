"""OpenAI's bodies as msgspec Structs, and the table of what is done with each field."""
