//! Messages and client generated from `proto/kv_indexer.proto`.
//!
//! Used by the bridge, by tests and by Rust routers. The server reads its
//! requests with `server::wire` instead and never builds these.

#![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, reason = "generated code")]

tonic::include_proto!("kv_indexer.v1");
