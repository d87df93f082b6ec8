//! Files of recorded messages.
//!
//! A recording is a gzip file. Its first line is a JSON object that says what it is;
//! what follows is in one of two forms.
//!
//! **Own recordings** have the key `kv-indexer-recording`, with the version 1, and go on
//! with records, integers little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 1 | what happened: `c` connected, `d` disconnected, `m` a message |
//! | 8 | when, in microseconds since the recording began |
//! | 1 | of a message: how many frames it has |
//! | 4 + n, each | of a frame: its length and its bytes |
//!
//! **Captures**, as in `tests/data`, have one JSON object per line with `stream`, `t` in
//! seconds, `via` and `frames` in hex; of them only what a subscriber received counts.
//! They may also be plain text.
//!
//! Reading keeps one message at a time, whose size is bounded as on the wire, so a file
//! costs no more memory than the stream did. A file that was cut off, as by a recorder
//! that was killed, is read up to there and then is an error.

mod read;
mod write;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

pub(super) use read::Recording;
pub(super) use write::Writer;

/// Key of the first line of an own recording, and the version behind it.
const FORMAT_KEY: &str = "kv-indexer-recording";
const FORMAT_VERSION: u64 = 1;

/// Something that happened to a stream.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// Which stream.
    pub(super) stream: Arc<str>,
    /// Since the recording began.
    pub(super) at: Duration,
    pub(super) what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum What {
    /// A publisher is there.
    Connected,
    /// The publisher is gone.
    Disconnected,
    /// Its message, by frames.
    Message(Vec<Bytes>),
}
