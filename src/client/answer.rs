//! Matches, read in place from the received bytes.
//!
//! An [`Answer`] keeps the bytes and was walked through once, so a walk of its
//! matches cannot meet an error and copies nothing; a worker's names are slices of
//! the answer. What a server says is checked against the question: a prefix that is
//! longer than the prompt is no answer to it.

use std::fmt;

use bytes::{Buf, Bytes};
use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field};

use super::Prompt;
use crate::arena::Labels;
use crate::scan::PrefixMatch;

/// How many leading blocks one worker can reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match<'a> {
    /// The worker's name.
    pub worker_id: &'a str,
    /// URL under which routers reach it, to be compared byte for byte; never empty.
    pub address: &'a str,
    /// Leading blocks of the prompt, at least 1.
    pub blocks: u32,
}

/// What was found of a prompt; the default is of a prompt without hashes.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    body: Body,
    blocks_read: u32,
    prompt_blocks: usize,
}

#[derive(Debug, Clone)]
enum Body {
    /// `MatchExternalKvPrefixResponse`. Invariant: walked through without an error.
    Wire(Bytes),
    /// Of an index of this process. Invariant: every worker has its label.
    Found { matches: Box<[PrefixMatch]>, labels: Labels },
}

impl Default for Body {
    fn default() -> Self {
        Body::Wire(Bytes::new())
    }
}

/// Why received bytes are no answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Malformed {
    /// They are no protobuf message of this kind.
    Wire(DecodeError),
    /// A length points past the end of the message.
    Truncated,
    /// A worker's name or address is not UTF-8.
    Text,
    /// A match is longer than the prompt.
    Blocks {
        /// Blocks of the match.
        blocks: u32,
    },
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Wire(error) => write!(f, "the answer is malformed: {error}"),
            Malformed::Truncated => f.write_str("the answer is malformed: a field ends past the message"),
            Malformed::Text => f.write_str("the answer is malformed: a worker's name is not UTF-8"),
            Malformed::Blocks { blocks } => write!(f, "the answer has {blocks} blocks, more than the prompt"),
        }
    }
}

impl std::error::Error for Malformed {}

impl From<DecodeError> for Malformed {
    fn from(error: DecodeError) -> Self {
        Malformed::Wire(error)
    }
}

impl Answer {
    /// Reads a whole `MatchExternalKvPrefixResponse` that answers `prompt`.
    ///
    /// # Errors
    /// The bytes are no such message, or answer another prompt.
    pub fn from_wire(bytes: Bytes, prompt: &Prompt) -> Result<Self, Malformed> {
        let sent = prompt.hashes().len();
        let mut fields = Fields { rest: &bytes, blocks_read: 0 };
        while let Some(found) = fields.next_match()? {
            if usize::try_from(found.blocks).is_ok_and(|blocks| blocks > sent) {
                return Err(Malformed::Blocks { blocks: found.blocks });
            }
        }
        let blocks_read = fields.blocks_read;
        Ok(Answer { body: Body::Wire(bytes), blocks_read, prompt_blocks: prompt.blocks() })
    }

    /// An answer of an index of this process; `labels` are of the moment of the scan.
    pub(super) fn found(matches: &[PrefixMatch], labels: Labels, blocks_read: u32, prompt: &Prompt) -> Self {
        let matches = matches.iter().copied().filter(|found| labels.get(found.worker).is_some()).collect();
        Answer { body: Body::Found { matches, labels }, blocks_read, prompt_blocks: prompt.blocks() }
    }

    /// The matches, longest first, equal ones in a stable order.
    pub fn matches(&self) -> Matches<'_> {
        Matches(match &self.body {
            Body::Wire(bytes) => Walk::Wire(Fields { rest: bytes, blocks_read: 0 }),
            Body::Found { matches, labels } => Walk::Found(matches.iter(), labels),
        })
    }

    /// The longest match.
    pub fn best(&self) -> Option<Match<'_>> {
        self.matches().next()
    }

    /// The match of the worker at this address, compared byte for byte.
    pub fn at_address(&self, address: &str) -> Option<Match<'_>> {
        self.matches().find(|found| found.address == address)
    }

    /// Whether no worker has the prompt's first block.
    pub fn is_empty(&self) -> bool {
        self.best().is_none()
    }

    /// Blocks really looked at, from the first.
    pub fn blocks_read(&self) -> u32 {
        self.blocks_read
    }

    /// The part of the whole prompt that `blocks` are, from 0 to 1, also when the prompt was cut.
    pub fn match_rate(&self, blocks: u32) -> f64 {
        if self.prompt_blocks == 0 { 0.0 } else { f64::from(blocks) / self.prompt_blocks as f64 }
    }
}

/// The matches of an answer, borrowed from it.
#[derive(Debug, Clone)]
pub struct Matches<'a>(Walk<'a>);

#[derive(Debug, Clone)]
enum Walk<'a> {
    Wire(Fields<'a>),
    Found(std::slice::Iter<'a, PrefixMatch>, &'a Labels),
}

impl<'a> Iterator for Matches<'a> {
    type Item = Match<'a>;

    fn next(&mut self) -> Option<Match<'a>> {
        match &mut self.0 {
            // The walk at the answer's making met no error, so none is lost here.
            Walk::Wire(fields) => fields.next_match().ok().flatten(),
            Walk::Found(found, labels) => {
                let found = found.next()?;
                let label = labels.get(found.worker)?;
                Some(Match { worker_id: label.id(), address: label.address(), blocks: found.blocks })
            }
        }
    }
}

/// The fields of an answer that have not been read yet.
#[derive(Debug, Clone)]
struct Fields<'a> {
    rest: &'a [u8],
    blocks_read: u32,
}

impl<'a> Fields<'a> {
    /// Reads up to and with the next match; the others' fields are kept or skipped.
    fn next_match(&mut self) -> Result<Option<Match<'a>>, Malformed> {
        while self.rest.has_remaining() {
            let (tag, wire_type) = decode_key(&mut self.rest)?;
            match tag {
                1 => {
                    let found = read_match(delimited(wire_type, &mut self.rest)?)?;
                    // A worker without an address or a prefix is none to route to.
                    if !found.address.is_empty() && found.blocks > 0 {
                        return Ok(Some(found));
                    }
                }
                3 => self.blocks_read = number(wire_type, &mut self.rest)?,
                _ => skip_field(wire_type, tag, &mut self.rest, DecodeContext::default())?,
            }
        }
        Ok(None)
    }
}

fn read_match(mut message: &[u8]) -> Result<Match<'_>, Malformed> {
    let mut found = Match { worker_id: "", address: "", blocks: 0 };
    while message.has_remaining() {
        let (tag, wire_type) = decode_key(&mut message)?;
        match tag {
            1 => found.address = text(wire_type, &mut message)?,
            2 => found.blocks = number(wire_type, &mut message)?,
            3 => found.worker_id = text(wire_type, &mut message)?,
            _ => skip_field(wire_type, tag, &mut message, DecodeContext::default())?,
        }
    }
    Ok(found)
}

fn delimited<'a>(wire_type: WireType, source: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let length = usize::try_from(decode_varint(source)?).map_err(|_| Malformed::Truncated)?;
    let (field, rest) = source.split_at_checked(length).ok_or(Malformed::Truncated)?;
    *source = rest;
    Ok(field)
}

fn text<'a>(wire_type: WireType, source: &mut &'a [u8]) -> Result<&'a str, Malformed> {
    str::from_utf8(delimited(wire_type, source)?).map_err(|_| Malformed::Text)
}

/// A `uint32`; protobuf cuts wider varints to their low bits.
fn number(wire_type: WireType, source: &mut &[u8]) -> Result<u32, Malformed> {
    check_wire_type(WireType::Varint, wire_type)?;
    Ok(decode_varint(source)? as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::pb::{ExternalKvPrefixMatch, MatchExternalKvPrefixResponse};

    fn prompt(blocks: i64) -> Prompt {
        Prompt::new(&(0..blocks).collect::<Vec<_>>())
    }

    fn row(worker: &str, address: &str, blocks: u32) -> ExternalKvPrefixMatch {
        ExternalKvPrefixMatch {
            worker_address: address.into(),
            matched_prefix_blocks: blocks,
            worker_id: worker.into(),
        }
    }

    fn encoded(matches: Vec<ExternalKvPrefixMatch>) -> Bytes {
        let best_prefix_blocks = matches.first().map_or(0, |best| best.matched_prefix_blocks);
        MatchExternalKvPrefixResponse { matches, best_prefix_blocks, blocks_read: 9 }.encode_to_vec().into()
    }

    #[test]
    fn matches_are_slices_of_the_answer() {
        let bytes = encoded(vec![row("w1", "http://one", 4), row("w2", "http://two", 2)]);
        let answer = Answer::from_wire(bytes.clone(), &prompt(8)).expect("an answer");
        let read: Vec<_> =
            answer.matches().map(|found| (found.worker_id, found.address, found.blocks)).collect();
        assert_eq!(read, [("w1", "http://one", 4), ("w2", "http://two", 2)]);
        for found in answer.matches() {
            for text in [found.worker_id, found.address] {
                assert!(bytes.as_ptr_range().contains(&text.as_ptr()), "{text} was copied");
            }
        }
        assert_eq!((answer.blocks_read(), answer.match_rate(4)), (9, 0.5));
        assert_eq!(answer.at_address("http://two").map(|found| found.worker_id), Some("w2"));
        assert_eq!(answer.at_address("http://tw"), None);
    }

    #[test]
    fn the_rate_of_a_cut_prompt_is_of_its_whole_length() {
        let sent = super::super::HASHES_PER_QUERY_MAX as i64;
        let answer = Answer::from_wire(encoded(vec![row("w", "a", sent as u32)]), &prompt(2 * sent));
        let answer = answer.expect("an answer");
        assert_eq!(answer.match_rate(answer.best().expect("a match").blocks), 0.5);
    }

    #[test]
    fn a_match_longer_than_what_was_sent_is_no_answer() {
        let longer = encoded(vec![row("w", "a", 4)]);
        assert!(Answer::from_wire(longer.clone(), &prompt(4)).is_ok());
        assert_eq!(Answer::from_wire(longer, &prompt(3)).unwrap_err(), Malformed::Blocks { blocks: 4 });
    }

    #[test]
    fn nobody_to_route_to_is_left_out() {
        let answer = encoded(vec![row("w", "", 4), row("w", "a", 0), row("", "b", 1)]);
        let answer = Answer::from_wire(answer, &prompt(4)).expect("an answer");
        assert_eq!(answer.best(), Some(Match { worker_id: "", address: "b", blocks: 1 }));
        assert_eq!(answer.matches().count(), 1);
    }

    #[test]
    fn hostile_bytes_are_refused() {
        let check = |bytes: &'static [u8], expected: fn(&Malformed) -> bool| {
            let error = Answer::from_wire(Bytes::from_static(bytes), &prompt(4)).expect_err("hostile");
            assert!(expected(&error), "{bytes:x?}: {error:?}");
        };
        check(b"\x0a\x05\x0a\x01a", |error| *error == Malformed::Truncated);
        check(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", |error| *error == Malformed::Truncated);
        check(b"\x0a\x03\x0a\x01\xff", |error| *error == Malformed::Text);
        check(b"\x0a\x04\x0a\x03a", |error| *error == Malformed::Truncated);
        check(b"\x08\x01", |error| matches!(error, Malformed::Wire(_)));
        check(b"\x1a\x00", |error| matches!(error, Malformed::Wire(_)));
        check(b"\xff", |error| matches!(error, Malformed::Wire(_)));
        check(&[0x23; 10_000], |error| matches!(error, Malformed::Wire(_)));
    }

    proptest! {
        /// What prost reads is what we read, on answers and on answers with a byte changed.
        #[test]
        fn answers_read_as_prost_reads_them(
            rows in prop::collection::vec(("[a-z]{0,5}", "[a-z]{0,5}", 0_u32..6), 0..6),
            change in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
        ) {
            let rows = rows.iter().map(|(worker, address, blocks)| row(worker, address, *blocks)).collect();
            let mut bytes = encoded(rows).to_vec();
            if let Some((at, to)) = change {
                let at = at.index(bytes.len());
                bytes[at] = to;
            }
            let bytes = Bytes::from(bytes);
            let prompt = prompt(64);
            match (Answer::from_wire(bytes.clone(), &prompt), MatchExternalKvPrefixResponse::decode(bytes)) {
                (Ok(ours), Ok(theirs)) => {
                    let theirs: Vec<_> = theirs.matches.iter()
                        .filter(|row| !row.worker_address.is_empty() && row.matched_prefix_blocks > 0)
                        .map(|row| (&row.worker_id[..], &row.worker_address[..], row.matched_prefix_blocks))
                        .collect();
                    let ours: Vec<_> =
                        ours.matches().map(|row| (row.worker_id, row.address, row.blocks)).collect();
                    prop_assert_eq!(ours, theirs);
                }
                // prost also reads `best_prefix_blocks`, which says nothing new and is skipped here.
                (Ok(_), Err(error)) => prop_assert!(error.to_string().contains("best_prefix_blocks"), "{}", error),
                (Err(Malformed::Blocks { blocks }), Ok(_)) => prop_assert!(blocks > 64),
                (Err(error), Ok(_)) => prop_assert!(false, "{} of an answer that prost reads", error),
                (Err(_), Err(_)) => {}
            }
        }
    }
}
