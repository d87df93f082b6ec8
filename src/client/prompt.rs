//! A prompt's hashes, encoded once as the request that carries them.
//!
//! A packed `repeated sfixed64` is the hashes' little-endian bytes behind a key and a
//! length, so the message is made in one pass, and every attempt at every endpoint
//! sends the same bytes. It knows no connection.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint};

use crate::arena::PackedHashes;
use crate::limits::MESSAGE_BYTES_MAX;

/// Room left for a message's keys and lengths.
const HEADROOM_BYTES: usize = 16;

/// Most hashes that a query carries: a longer prompt is cut to this many leading ones.
pub const HASHES_PER_QUERY_MAX: usize = (MESSAGE_BYTES_MAX - HEADROOM_BYTES) / size_of::<i64>();

/// The hashes of a prompt's blocks, from its first block on. Cloning it copies nothing.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// `MatchExternalKvPrefixRequest`; empty if there are no hashes.
    message: Bytes,
    /// Where the hashes start in `message`.
    hashes_at: usize,
    /// Blocks of the whole prompt. Invariant: at least as many as there are hashes.
    blocks: usize,
}

impl Prompt {
    /// A prompt with these hashes.
    pub fn new(hashes: &[i64]) -> Self {
        Prompt::collect(hashes.iter().copied())
    }

    /// A prompt with these hashes, in order; those that fit no message any more are not taken.
    pub fn collect(hashes: impl ExactSizeIterator<Item = i64>) -> Self {
        let mut prompt = Builder::new(hashes.len());
        for hash in hashes.take(HASHES_PER_QUERY_MAX) {
            prompt.message.put_i64_le(hash);
        }
        prompt.finish()
    }

    /// A prompt with hashes that are packed already.
    pub fn from_packed(hashes: PackedHashes<'_>) -> Self {
        let mut prompt = Builder::new(hashes.len());
        prompt.message.put_slice(hashes.first(HASHES_PER_QUERY_MAX).as_bytes().as_flattened());
        prompt.finish()
    }

    /// Blocks of the whole prompt: what a match rate is a part of, also when the prompt was cut.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The hashes that are sent.
    pub fn hashes(&self) -> PackedHashes<'_> {
        PackedHashes::new(&self.message[self.hashes_at..]).expect("a prompt holds whole hashes")
    }

    /// Whether there is nothing to ask for.
    pub fn is_empty(&self) -> bool {
        self.message.is_empty()
    }

    /// The request.
    pub(super) fn message(&self) -> Bytes {
        self.message.clone()
    }
}

impl fmt::Debug for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, sent) = (self.blocks, self.hashes().len());
        f.debug_struct("Prompt").field("blocks", &blocks).field("sent", &sent).finish()
    }
}

/// A message whose hashes are still to be written.
struct Builder {
    message: BytesMut,
    hashes_at: usize,
    blocks: usize,
}

impl Builder {
    fn new(blocks: usize) -> Self {
        let bytes = blocks.min(HASHES_PER_QUERY_MAX) * size_of::<i64>();
        let mut message = BytesMut::new();
        if bytes > 0 {
            message.reserve(HEADROOM_BYTES + bytes);
            encode_key(1, WireType::LengthDelimited, &mut message);
            encode_varint(bytes as u64, &mut message);
        }
        Builder { hashes_at: message.len(), message, blocks }
    }

    fn finish(self) -> Prompt {
        Prompt { message: self.message.freeze(), hashes_at: self.hashes_at, blocks: self.blocks }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::pb::MatchExternalKvPrefixRequest;

    #[track_caller]
    fn check(hashes: &[i64]) {
        let prompt = Prompt::new(hashes);
        let packed = PackedHashes::pack(hashes);
        assert_eq!(prompt, Prompt::from_packed(PackedHashes::new(&packed).expect("whole hashes")));
        assert_eq!(prompt.blocks(), hashes.len());
        assert_eq!(prompt.is_empty(), hashes.is_empty());
        let sent = MatchExternalKvPrefixRequest::decode(prompt.message()).expect("protobuf");
        let fits = &hashes[..hashes.len().min(HASHES_PER_QUERY_MAX)];
        assert!(sent.hashes == fits && sent.max_blocks == 0);
        assert!(prompt.hashes().iter().eq(fits.iter().copied()));
        assert!(prompt.message().len() <= MESSAGE_BYTES_MAX);
    }

    #[test]
    fn the_request_is_what_prost_reads() {
        check(&[]);
        check(&[0]);
        check(&[1, -1, i64::MIN, i64::MAX]);
        check(&(0..20_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_prompt_past_a_message_is_cut_and_keeps_its_length() {
        let hashes: Vec<i64> = (0..HASHES_PER_QUERY_MAX as i64 + 3).collect();
        check(&hashes[..HASHES_PER_QUERY_MAX]);
        check(&hashes);
        let sent = Prompt::new(&hashes).message().len();
        assert!(
            sent > MESSAGE_BYTES_MAX - HEADROOM_BYTES - size_of::<i64>(),
            "{sent} bytes are all that fit"
        );
    }
}
