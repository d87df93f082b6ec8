//! Messages and clients generated from `proto/`.
//!
//! Used by the bridge, by tests and by Rust routers. The server reads its
//! requests of the index with `server::wire` instead and never builds these; the
//! admin service, which is called rarely, is served from here.

#![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, reason = "generated code")]

tonic::include_proto!("kv_indexer.v1");

/// Messages, client and service generated from `proto/kv_indexer_admin.proto`.
pub mod admin {
    include!(concat!(env!("OUT_DIR"), "/admin/kv_indexer.admin.v1.rs"));
}
