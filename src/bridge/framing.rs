//! The frames of one ZeroMQ message: topic, sequence, payload.
//!
//! Engines send all three; some publishers of other make leave the topic out.
//! It knows no socket and does not look into the payload.

use std::fmt;

use bytes::Bytes;

/// A message that is one batch of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    /// The publisher's count of its batches, from 0 at each of its starts.
    pub(super) sequence: u64,
    /// MessagePack.
    pub(super) payload: Bytes,
}

/// Why a message is no batch of this stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameError {
    /// It has neither two nor three frames.
    Count(usize),
    /// Its sequence is not 8 bytes long.
    Sequence(usize),
    /// Its topic only begins with the one asked for, which is all that ZeroMQ looks at.
    Topic,
    /// It is the marker that ends a replay: no batch.
    EndMarker,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::Count(count) => write!(f, "{count} frames instead of topic, sequence and payload"),
            FrameError::Sequence(length) => write!(f, "a sequence of {length} bytes instead of 8"),
            FrameError::Topic => f.write_str("another topic"),
            FrameError::EndMarker => f.write_str("the end marker of a replay"),
        }
    }
}

/// Sequence that ends a replay.
const END_MARKER: u64 = u64::MAX;

/// Reads a message's frames; an empty `topic` takes every topic.
///
/// # Errors
/// The message is no batch of this stream.
pub(super) fn parse(frames: &[Bytes], topic: &str) -> Result<Frame, FrameError> {
    let (named, sequence, payload) = match frames {
        [named, sequence, payload] => (Some(named), sequence, payload),
        [sequence, payload] => (None, sequence, payload),
        _ => return Err(FrameError::Count(frames.len())),
    };
    if let Some(named) = named
        && !topic.is_empty()
        && named[..] != *topic.as_bytes()
    {
        return Err(FrameError::Topic);
    }
    let raw = <[u8; 8]>::try_from(&sequence[..]).map_err(|_| FrameError::Sequence(sequence.len()))?;
    let sequence = u64::from_be_bytes(raw);
    if sequence == END_MARKER {
        return Err(FrameError::EndMarker);
    }
    Ok(Frame { sequence, payload: payload.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(frames: &[&'static [u8]], topic: &str, expected: Result<u64, FrameError>) {
        let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::from_static(frame)).collect();
        assert_eq!(parse(&frames, topic).map(|frame| frame.sequence), expected, "{frames:?} {topic:?}");
    }

    #[test]
    fn messages_are_told_apart_by_their_frames() {
        const SEVEN: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 7];
        check(&[b"kv", SEVEN, b"x"], "kv", Ok(7));
        check(&[b"kv", SEVEN, b"x"], "", Ok(7));
        check(&[b"", SEVEN, b"x"], "", Ok(7));
        check(&[SEVEN, b"x"], "kv", Ok(7));
        check(&[b"kv-2", SEVEN, b"x"], "kv", Err(FrameError::Topic));
        check(&[b"k", SEVEN, b"x"], "kv", Err(FrameError::Topic));
        check(&[b"kv", b"1234", b"x"], "kv", Err(FrameError::Sequence(4)));
        check(&[b"kv", &[0xff; 8], b""], "kv", Err(FrameError::EndMarker));
        check(&[], "kv", Err(FrameError::Count(0)));
        check(&[b"x"], "", Err(FrameError::Count(1)));
        check(&[b"kv", SEVEN, b"x", b"y"], "kv", Err(FrameError::Count(4)));
    }
}
