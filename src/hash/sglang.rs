//! SGLang's block hashes.
//!
//! A page's digest is the SHA-256 of the digest before it, nothing at the first, and the
//! page's tokens as little-endian numbers of 32 bits; a page with a token past these has
//! a byte 0xff and its tokens in 64 bits. The hash is the digest's first 8 bytes,
//! big-endian. A page of pairs, of a tree for speculative decoding, has both tokens of
//! each pair. A cache salt starts the chain with a digest of its own; a namespace is
//! folded into each hash afterwards and leaves the chain as it is.

use std::iter::FusedIterator;
use std::num::NonZeroUsize;

use sha2::{Digest as _, Sha256};

use super::Digest;

/// What a cache salt's digest starts with.
const SALT_TAG: &[u8] = b"sglang-cache-salt-v1\0";

/// What a namespace's digest starts with.
const NAMESPACE_TAG: &[u8] = b"sglang-kv-event-namespace-v1";

/// What marks a page of tokens in 64 bits.
const WIDE_TAG: [u8; 1] = [0xff];

/// How the workers of a fleet hash: SGLang's page size and what a request adds.
#[derive(Debug, Clone)]
pub struct Sglang {
    page_tokens: NonZeroUsize,
    pairs: bool,
    salt: Option<Digest>,
    namespace: Option<Digest>,
}

impl Sglang {
    /// Of workers with this `--page-size`, in tokens.
    pub fn new(page_tokens: NonZeroUsize) -> Self {
        Sglang { page_tokens, pairs: false, salt: None, namespace: None }
    }

    /// Of workers whose cache is keyed by pairs of tokens, as with EAGLE.
    #[must_use]
    pub fn pairs(mut self, pairs: bool) -> Self {
        self.pairs = pairs;
        self
    }

    /// Of a request with this `cache_salt`; an empty one is none.
    #[must_use]
    pub fn cache_salt(mut self, salt: &str) -> Self {
        let digest = || Sha256::new().chain_update(SALT_TAG).chain_update(salt).finalize().into();
        self.salt = (!salt.is_empty()).then(digest);
        self
    }

    /// Of a request in a namespace that the engine folds into what it reports.
    ///
    /// SGLang does so for a request of a LoRA adapter, with its extra key, which ends
    /// in the adapter's id, and no salt; in the event format made for Dynamo it does so
    /// for every request with an extra key or a salt, with both. Other extra keys are
    /// not in the hashes: two requests that differ by them alone look alike.
    #[must_use]
    pub fn namespace(mut self, extra_key: Option<&str>, cache_salt: Option<&str>) -> Self {
        let digest = || {
            let digest = [extra_key, cache_salt].iter().fold(
                Sha256::new().chain_update(NAMESPACE_TAG),
                |digest, part| match part {
                    None => digest.chain_update([0]),
                    Some(text) => digest
                        .chain_update([1])
                        .chain_update((text.len() as u64).to_le_bytes())
                        .chain_update(text),
                },
            );
            digest.finalize().into()
        };
        self.namespace = (extra_key.is_some() || cache_salt.is_some()).then(digest);
        self
    }

    /// The hashes of the whole blocks of `tokens`, from the first.
    pub fn hashes<'a, T: Copy + Into<u64>>(&'a self, tokens: &'a [T]) -> SglangHashes<'a, T> {
        SglangHashes { rules: self, tokens, parent: self.salt }
    }
}

/// Hashes of a prompt's whole blocks, computed as they are asked for.
#[derive(Debug, Clone)]
pub struct SglangHashes<'a, T> {
    rules: &'a Sglang,
    /// From the next block's first token on.
    tokens: &'a [T],
    parent: Option<Digest>,
}

impl<T: Copy + Into<u64>> Iterator for SglangHashes<'_, T> {
    type Item = i64;

    fn next(&mut self) -> Option<i64> {
        let page = self.rules.page_tokens.get();
        // The last pair of a page ends with the next page's first token.
        let looked_at = self.tokens.get(..page.checked_add(usize::from(self.rules.pairs))?)?;
        let digest = page_digest(self.parent, looked_at, self.rules.pairs);
        self.tokens = &self.tokens[page..];
        self.parent = Some(digest);
        let hash = fold(&digest);
        Some(match self.rules.namespace {
            None => hash,
            Some(seed) => {
                let folded = Sha256::new().chain_update(seed).chain_update(hash.to_be_bytes()).finalize();
                fold(&folded.into())
            }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let units = self.tokens.len().saturating_sub(usize::from(self.rules.pairs));
        let blocks = units / self.rules.page_tokens;
        (blocks, Some(blocks))
    }
}

impl<T: Copy + Into<u64>> ExactSizeIterator for SglangHashes<'_, T> {}
impl<T: Copy + Into<u64>> FusedIterator for SglangHashes<'_, T> {}

fn page_digest<T: Copy + Into<u64>>(parent: Option<Digest>, tokens: &[T], pairs: bool) -> Digest {
    let mut digest = Sha256::new();
    if let Some(parent) = parent {
        digest.update(parent);
    }
    let wide = tokens.iter().any(|token| u32::try_from((*token).into()).is_err());
    if wide {
        digest.update(WIDE_TAG);
    }
    let mut update = |token: T| {
        let bytes = token.into().to_le_bytes();
        digest.update(if wide { &bytes[..] } else { &bytes[..4] });
    };
    if pairs {
        for (first, second) in tokens.iter().zip(&tokens[1..]) {
            update(*first);
            update(*second);
        }
    } else {
        tokens.iter().copied().for_each(update);
    }
    digest.finalize().into()
}

fn fold(digest: &Digest) -> i64 {
    let [head, ..] = digest.as_chunks::<8>().0 else { unreachable!("a digest has 32 bytes") };
    i64::from_be_bytes(*head)
}
