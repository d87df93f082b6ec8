//! The map of a fleet's KV caches: which worker holds which block.
//!
//! LLM engines cache attention keys and values in blocks named by a hash that
//! chains over the whole prefix. A router that knows who holds the longest
//! prefix of a prompt saves that much prefill. This crate is that knowledge:
//!
//! - [`arena`] holds placements compactly and changes them batch by batch;
//! - [`scan`] answers queries from a read view of it;
//! - [`server`] puts both behind gRPC;
//! - [`bridge`] follows an engine's event stream and reports it to a server.
//!
//! A Rust router can embed the index: [`arena::Index`] and [`scan`] need no
//! network, no runtime and no environment. The library never reads the
//! environment or binds a port by itself; the binaries do.

pub mod arena;
pub mod bridge;
pub mod limits;
pub mod pb;
pub mod scan;
pub mod server;
pub mod settings;
