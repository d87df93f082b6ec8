//! The index behind gRPC.
