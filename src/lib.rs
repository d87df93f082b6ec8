//! The map of a fleet's KV caches: which worker holds which block.
//!
//! LLM engines cache attention keys and values in blocks named by a hash that
//! chains over the whole prefix. A router that knows who holds the longest
//! prefix of a prompt saves that much prefill. This crate is that knowledge:
//!
//! - [`arena`] holds placements compactly and changes them batch by batch;
//! - [`scan`] answers queries from a read view of it;
//! - [`server`] puts both behind gRPC;
//! - [`bridge`] follows an engine's event stream and reports it to a server;
//! - [`client`] asks servers, or an index of this process, for a router;
//! - [`hash`] names a prompt's blocks as the engines do, from its tokens;
//! - [`cli`] is the command line over all of these;
//! - [`http`] and [`metrics`] show people and Prometheus how server and bridge are doing.
//!
//! A Rust router can embed the index: [`arena::Index`] and [`scan`] need no
//! network, no runtime and no environment. The library never reads the
//! environment or binds a port by itself; the binaries do.
//!
//! ```
//! use sgl_kv_indexer::arena::{Action, Batch, BatchError, Index, PackedHashes, Tier};
//! use sgl_kv_indexer::scan::{PrefixScratch, prefix};
//!
//! let index = Index::new();
//! // Hashes are their little-endian bytes, as a packed `repeated sfixed64` has them.
//! let prompt = PackedHashes::pack(&[11, 22, 33]);
//! let hashes = PackedHashes::new(&prompt).expect("a multiple of eight bytes");
//! index.apply(&Batch {
//!     worker_id: "worker-0",
//!     worker_address: "http://10.0.0.1:30000",
//!     cache_spec: None,
//!     seq: 1,
//!     actions: &[Action::Report { tier: Tier::Hbm, hashes: hashes.first(2), masks: &[], tokens: &[16, 16] }],
//! })?;
//!
//! let mut scratch = PrefixScratch::default();
//! let view = index.read();
//! prefix(&view, hashes, &mut scratch);
//! let labels = view.labels();
//! drop(view);
//! let best = scratch.matches().first().expect("a worker has the first block");
//! assert_eq!(best.blocks, 2);
//! assert_eq!(labels.get(best.worker).map(|label| label.address()), Some("http://10.0.0.1:30000"));
//! # Ok::<(), BatchError>(())
//! ```

pub mod arena;
pub mod bridge;
pub mod cli;
pub mod client;
pub mod hash;
pub mod http;
pub mod limits;
pub mod metrics;
pub mod pb;
pub mod scan;
pub mod server;
pub mod settings;
pub mod version;
