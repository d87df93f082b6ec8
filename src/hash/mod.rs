//! From token ids to block hashes, as the engines compute them.
//!
//! An index knows blocks by the hashes that engines report, so a router that has a
//! prompt's tokens must hash them as the engine of its workers does. A block is a
//! fixed number of tokens and its hash chains over everything before it; what is left
//! of a prompt after its last whole block has no hash, as engines cache whole blocks.
//!
//! - [`Sglang`] is SGLang's only function since a release between 0.5.3, which used
//!   Python's own `hash`, and 0.5.10.
//! - [`VllmCbor`] is vLLM's `--prefix-caching-hash-algo sha256_cbor`. vLLM's default,
//!   `sha256`, hashes Python's own pickled objects and can be computed in Python
//!   alone: start vLLM with the other one, or take the hashes from a Python process.
//!
//! Both are checked against values that the engines' own code computed
//! (`tests/data/engine-hash-values.json`, by `scripts/engine-hash-values`) and against
//! the recorded streams of `tests/data`.
//!
//! It knows no tokenizer and no index. Cost: one SHA-256 over a block's tokens per
//! block, a few hundred nanoseconds; nothing is allocated per block.
//!
//! ```
//! use sgl_kv_indexer::client::Prompt;
//! use sgl_kv_indexer::hash::Sglang;
//!
//! let page = std::num::NonZeroUsize::new(4).expect("not zero");
//! let tokens: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
//! let prompt = Prompt::collect(Sglang::new(page).hashes(&tokens));
//! assert_eq!(prompt.blocks(), 2);
//! ```

mod sglang;
mod vllm;

pub use sglang::{Sglang, SglangHashes};
pub use vllm::{Media, VllmCbor, VllmHashes};

/// A SHA-256 digest.
type Digest = [u8; 32];
