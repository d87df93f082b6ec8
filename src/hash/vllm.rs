//! vLLM's block hashes, as its `sha256_cbor` computes them.
//!
//! A block's digest is the SHA-256 of the canonical CBOR of three things: the digest
//! before it, the block's tokens, and its extra keys or null. At the first block the
//! digest of the seed's own CBOR stands before it. The hash is the digest's last 8 bytes,
//! big-endian, which is what vLLM reports when told to report integers, and to what
//! the bridge folds the bytes that it reports otherwise. Extra keys are tagged, as
//! vLLM 0.33 has them; releases before their tagging have other hashes for requests
//! with extra keys, and the same for all others.

use std::convert::Infallible;
use std::iter::FusedIterator;
use std::num::NonZeroUsize;
use std::ops::Range;

use minicbor::Encoder;
use minicbor::encode::{Error, Write};
use sha2::{Digest as _, Sha256};

use super::Digest;

/// The seed of a vLLM whose `PYTHONHASHSEED` is not set. Releases before it was fixed
/// draw one at random then, and their hashes cannot be computed elsewhere.
const SEED_DEFAULT: &str = "vllm-none-hash";

/// An image, or another input, that stands for some of a prompt's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// vLLM's `mm_hash` of it.
    pub identifier: String,
    /// Positions of its placeholder tokens in the prompt.
    pub tokens: Range<usize>,
}

/// How the workers of a fleet hash: vLLM's block size and what a request adds.
#[derive(Debug, Clone)]
pub struct VllmCbor {
    block_tokens: NonZeroUsize,
    seed: Digest,
    lora: Option<(String, String)>,
    salt: Option<String>,
    media: Vec<Media>,
}

impl VllmCbor {
    /// Of workers with this `--block-size`, in tokens, and no `PYTHONHASHSEED`.
    pub fn new(block_tokens: NonZeroUsize) -> Self {
        VllmCbor { block_tokens, seed: seed(SEED_DEFAULT), lora: None, salt: None, media: Vec::new() }
    }

    /// Of workers that were started with this `PYTHONHASHSEED`.
    #[must_use]
    pub fn seed(mut self, text: &str) -> Self {
        self.seed = seed(text);
        self
    }

    /// Of a request of a LoRA adapter, with its name and path as the worker knows them.
    #[must_use]
    pub fn lora(mut self, name: &str, path: &str) -> Self {
        self.lora = Some((name.to_owned(), path.to_owned()));
        self
    }

    /// Of a request with this `cache_salt`; an empty one is none.
    #[must_use]
    pub fn cache_salt(mut self, salt: &str) -> Self {
        self.salt = (!salt.is_empty()).then(|| salt.to_owned());
        self
    }

    /// Of a request with these media, in any order.
    #[must_use]
    pub fn media(mut self, mut media: Vec<Media>) -> Self {
        media.sort_by_key(|media| media.tokens.start);
        self.media = media;
        self
    }

    /// The hashes of the whole blocks of `tokens`, from the first.
    pub fn hashes<'a, T: Copy + Into<u64>>(&'a self, tokens: &'a [T]) -> VllmHashes<'a, T> {
        VllmHashes { rules: self, tokens, at: 0, parent: self.seed }
    }

    /// Media with a token among these.
    fn media_in(&self, block: Range<usize>) -> impl Iterator<Item = &Media> + Clone {
        self.media
            .iter()
            .filter(move |media| media.tokens.start < block.end && block.start < media.tokens.end)
    }
}

/// Hashes of a prompt's whole blocks, computed as they are asked for.
#[derive(Debug, Clone)]
pub struct VllmHashes<'a, T> {
    rules: &'a VllmCbor,
    tokens: &'a [T],
    /// Position of the next block's first token.
    at: usize,
    parent: Digest,
}

impl<T: Copy + Into<u64>> Iterator for VllmHashes<'_, T> {
    type Item = i64;

    fn next(&mut self) -> Option<i64> {
        let end = self.at.checked_add(self.rules.block_tokens.get())?;
        let tokens = self.tokens.get(self.at..end)?;
        self.parent = block_digest(self.rules, &self.parent, tokens, self.at..end);
        self.at = end;
        let [.., tail] = self.parent.as_chunks::<8>().0 else { unreachable!("a digest has 32 bytes") };
        Some(i64::from_be_bytes(*tail))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let blocks = (self.tokens.len() - self.at) / self.rules.block_tokens;
        (blocks, Some(blocks))
    }
}

impl<T: Copy + Into<u64>> ExactSizeIterator for VllmHashes<'_, T> {}
impl<T: Copy + Into<u64>> FusedIterator for VllmHashes<'_, T> {}

/// CBOR that is hashed as it is written. Shortest lengths and integers, which the
/// encoder always writes, are all that is canonical about lists of these values.
struct Hasher(Sha256);

impl Write for Hasher {
    type Error = Infallible;

    fn write_all(&mut self, bytes: &[u8]) -> Result<(), Infallible> {
        self.0.update(bytes);
        Ok(())
    }
}

/// The digest of what `write` writes.
fn digest(write: impl FnOnce(&mut Encoder<Hasher>) -> Result<(), Error<Infallible>>) -> Digest {
    let mut encoder = Encoder::new(Hasher(Sha256::new()));
    // Only a value's own encoding could fail, and numbers, bytes and text have none that does.
    let written = write(&mut encoder);
    debug_assert!(written.is_ok(), "a hasher takes everything");
    encoder.into_writer().0.finalize().into()
}

fn seed(text: &str) -> Digest {
    digest(|cbor| cbor.str(text).map(drop))
}

fn block_digest<T: Copy + Into<u64>>(
    rules: &VllmCbor,
    parent: &Digest,
    tokens: &[T],
    block: Range<usize>,
) -> Digest {
    let media = rules.media_in(block.clone());
    let salt = rules.salt.as_ref().filter(|_| block.start == 0);
    let keys = usize::from(rules.lora.is_some()) + media.clone().count() + usize::from(salt.is_some());
    digest(|cbor| {
        cbor.array(3)?.bytes(parent)?.array(tokens.len() as u64)?;
        for token in tokens {
            cbor.u64((*token).into())?;
        }
        if keys == 0 {
            cbor.null()?;
            return Ok(());
        }
        cbor.array(keys as u64)?;
        if let Some((name, path)) = &rules.lora {
            cbor.array(3)?.str("lora")?.str(name)?.str(path)?;
        }
        for media in media {
            // Where it starts from the block's first token on, negative if before.
            let offset = media.tokens.start as i64 - block.start as i64;
            cbor.array(3)?.str("mm")?.str(&media.identifier)?.i64(offset)?;
        }
        if let Some(salt) = salt {
            cbor.array(2)?.str("cache_salt")?.str(salt)?;
        }
        Ok(())
    })
}
