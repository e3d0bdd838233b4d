"""The paths of the server; each module turns bodies into requests to the engine and back."""
