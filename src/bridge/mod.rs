//! From an engine's event stream to a server.
