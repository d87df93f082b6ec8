//! The bytes of a mirror's file: pure, little-endian, each read with a bound.
//!
//! A file is a list of frames:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | length of the body, at most [`BODY_BYTES_MAX`] |
//! | 4 | CRC-32 of the length and the body, begun with that of the frame before |
//! | … | body: a byte for its kind, then its fields |
//!
//! As each checksum begins with the last one, a frame counts only behind the very frames
//! that it was written behind. Kinds of bodies:
//!
//! | kind | fields |
//! |---|---|
//! | 1, head, first and nowhere else | format, and what the file is of: see [`Identity`] |
//! | 2, actions | of one RPC: type, tier, number of hashes, hashes, column of masks, column of sizes |
//! | 3, notes | of copies, each a tag and its fields |
//! | 4, mark | number, time and digest of the last batch; completeness |
//!
//! A column is a byte and then nothing (0), the value of all (1) or a value for each (2).

use std::io::{self, Read};
use std::time::{Duration, SystemTime};

use crate::bridge::config::Config;
use crate::bridge::copies::{Note, Reading};
use crate::bridge::event::{Dialect, GroupKind};
use crate::bridge::follow::Mark;
use crate::bridge::health::Incomplete;
use crate::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};
use crate::pb::{ExternalKvAction, ExternalKvActionType as Type, TierType};

/// The format, raised with every change of it.
const FORMAT: u32 = 1;

const MAGIC: &[u8] = b"kv-indexer mirror";

/// Most bytes of a body: an RPC's actions take half of it.
pub(super) const BODY_BYTES_MAX: usize = 512 * 1024;
const _: () = assert!(16 * HASHES_PER_CALL_MAX + 16 * ACTIONS_PER_APPLY_MAX < BODY_BYTES_MAX);
const _: () = assert!(NOTES_PER_BODY * (NOTE_BYTES + PLACE_BYTES) < BODY_BYTES_MAX);
const _: () = assert!(IDENTITY_BYTES_MAX < BODY_BYTES_MAX);

/// Most bytes of what a file is of.
pub(super) const IDENTITY_BYTES_MAX: usize = 128 * 1024;

/// Bytes of a frame before its body.
const FRAME_BYTES: usize = 8;

const NOTES_PER_BODY: usize = 16_384;
const NOTE_BYTES: usize = 13;
const PLACE_BYTES: usize = 11;

const HEAD: u8 = 1;
const ACTIONS: u8 = 2;
const NOTES: u8 = 3;
const MARK: u8 = 4;

/// What a file is of. One of anything else is begun anew, as its content means something else.
#[derive(Debug, Clone)]
pub(in crate::bridge) struct Identity {
    pub(super) worker_id: String,
    head: Vec<u8>,
}

impl Identity {
    /// The file of a stream with these settings.
    pub(in crate::bridge) fn of(config: &Config) -> Self {
        let mut head = start_of_head();
        for text in [&config.worker_id, &config.source.endpoint, &config.source.topic] {
            head.extend((text.len() as u64).to_le_bytes());
            head.extend(text.as_bytes());
        }
        let reading = match config.copies {
            Reading::Auto => 0,
            Reading::Set => 1,
            Reading::Count => 2,
        };
        head.extend([reading, u8::from(config.cache_spec.is_some()), u8::from(config.rank.is_some())]);
        head.extend(config.rank.unwrap_or(0).to_le_bytes());
        head.extend(config.clear_tiers.iter().map(|tier| *tier as u8));
        Identity { worker_id: config.worker_id.clone(), head }
    }

    /// The body of the first frame.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Whether a first frame says the same; otherwise what it says instead.
    pub(super) fn check(&self, head: &[u8]) -> Result<(), &'static str> {
        if head == self.head {
            return Ok(());
        }
        let known = head.starts_with(&start_of_head());
        Err(if known { "it is of other settings" } else { "it is of another format" })
    }
}

fn start_of_head() -> Vec<u8> {
    let mut head = vec![HEAD];
    head.extend(MAGIC);
    head.extend(FORMAT.to_le_bytes());
    head
}

/// Bodies that wait to be framed, each behind its length.
#[derive(Debug, Default)]
pub(super) struct Bodies(Vec<u8>);

impl Bodies {
    /// Appends the body that `put` writes.
    pub(super) fn push(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        let at = self.0.len();
        self.0.extend([0; 4]);
        put(&mut self.0);
        let length = (self.0.len() - at - 4) as u32;
        self.0[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.0.capacity()
    }

    /// The bodies in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = Fields(&self.0);
        std::iter::from_fn(move || {
            let length = rest.u32()? as usize;
            rest.take(length)
        })
    }
}

/// Appends a body's frame to `out` and moves the checksum on.
pub(super) fn put_frame(out: &mut Vec<u8>, chain: &mut u32, body: &[u8]) {
    let length = (body.len() as u32).to_le_bytes();
    *chain = checksum(*chain, length, body);
    out.extend(length);
    out.extend(chain.to_le_bytes());
    out.extend(body);
}

fn checksum(before: u32, length: [u8; 4], body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(before);
    hasher.update(&length);
    hasher.update(body);
    hasher.finalize()
}

/// Reads frames from the beginning of a file, as long as they are whole.
pub(super) struct Frames<R> {
    read: R,
    body: Vec<u8>,
    /// Bytes of the frames that were whole.
    pub(super) offset: u64,
    /// The last one's checksum.
    pub(super) chain: u32,
}

impl<R: Read> Frames<R> {
    pub(super) fn new(read: R) -> Self {
        Frames { read, body: Vec::new(), offset: 0, chain: 0 }
    }

    /// The next body; `None` at the end and where a frame is torn or damaged.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        let mut head = [0; FRAME_BYTES];
        if !read_whole(&mut self.read, &mut head)? {
            return Ok(None);
        }
        let [a, b, c, d, sum @ ..] = head;
        let (length, sum) = ([a, b, c, d], u32::from_le_bytes(sum));
        let bytes = u32::from_le_bytes(length) as usize;
        if bytes > BODY_BYTES_MAX {
            return Ok(None);
        }
        self.body.resize(bytes, 0);
        if !read_whole(&mut self.read, &mut self.body)? || checksum(self.chain, length, &self.body) != sum {
            return Ok(None);
        }
        self.chain = sum;
        self.offset += (FRAME_BYTES + bytes) as u64;
        Ok(Some(&self.body))
    }
}

/// Fills `bytes`; whether there were as many.
fn read_whole(read: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match read.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// What a body after the head says.
#[derive(Debug)]
pub(super) enum Entry {
    Actions(Vec<ExternalKvAction>),
    Notes(Vec<Note>),
    Mark(Mark, Option<(SystemTime, Incomplete)>),
}

/// Reads a body, `None` if it is none that is written here.
pub(super) fn entry(body: &[u8]) -> Option<Entry> {
    let (kind, fields) = body.split_first()?;
    let mut fields = Fields(fields);
    let entry = match *kind {
        ACTIONS => {
            let mut actions = Vec::new();
            while !fields.0.is_empty() {
                actions.push(fields.action()?);
            }
            Entry::Actions(actions)
        }
        NOTES => Entry::Notes(fields.notes()?),
        MARK => fields.mark()?,
        _ => return None,
    };
    fields.0.is_empty().then_some(entry)
}

/// Appends the body of one RPC's actions.
pub(super) fn put_actions(body: &mut Vec<u8>, actions: &[ExternalKvAction]) {
    body.push(ACTIONS);
    for action in actions {
        body.extend([action.r#type as u8, action.tier as u8]);
        body.extend((action.hashes.len() as u32).to_le_bytes());
        action.hashes.iter().for_each(|hash| body.extend(hash.to_le_bytes()));
        put_column(body, &action.component_masks);
        put_column(body, &action.block_sizes);
    }
}

fn put_column(body: &mut Vec<u8>, column: &[u32]) {
    match column {
        [] => body.push(0),
        [first, rest @ ..] if rest.iter().all(|value| value == first) => {
            body.push(1);
            body.extend(first.to_le_bytes());
        }
        _ => {
            body.push(2);
            column.iter().for_each(|value| body.extend(value.to_le_bytes()));
        }
    }
}

const CLEARED: u8 = 0;
const SEEN: u8 = 1;
const KIND: u8 = 2;
const PLACE: u8 = 3;
const COPIES: u8 = 4;

const DIALECTS: [Dialect; 2] = [Dialect::Sglang, Dialect::Vllm];
const KINDS: [GroupKind; 4] = [GroupKind::Full, GroupKind::SlidingWindow, GroupKind::Mamba, GroupKind::Other];

/// Appends bodies of notes. A note of copies is behind the place that it is of.
pub(super) fn put_notes(bodies: &mut Bodies, notes: impl Iterator<Item = Note>) {
    let mut notes = notes.peekable();
    while notes.peek().is_some() {
        bodies.push(|body| {
            body.push(NOTES);
            let mut at = None;
            notes.by_ref().take(NOTES_PER_BODY).for_each(|note| put_note(body, note, &mut at));
        });
    }
}

type Place = (TierType, Option<u32>, u32);

fn put_note(body: &mut Vec<u8>, note: Note, at: &mut Option<Place>) {
    match note {
        Note::Cleared => body.push(CLEARED),
        Note::Seen(dialect) => body.extend([SEEN, place_of(&DIALECTS, &dialect)]),
        Note::Kind(group, kind) => {
            body.push(KIND);
            body.extend(group.to_le_bytes());
            body.push(place_of(&KINDS, &kind));
        }
        Note::Copies { tier, group, block_tokens, hash, count } => {
            let place = (tier, group, block_tokens);
            if at.replace(place) != Some(place) {
                body.extend([PLACE, tier as u8, u8::from(group.is_some())]);
                body.extend(group.unwrap_or(0).to_le_bytes());
                body.extend(block_tokens.to_le_bytes());
            }
            body.push(COPIES);
            body.extend(hash.to_le_bytes());
            body.extend(count.to_le_bytes());
        }
    }
}

/// A value's place in its list; all values are there.
fn place_of<T: PartialEq>(list: &[T], value: &T) -> u8 {
    list.iter().position(|known| known == value).unwrap_or(list.len()) as u8
}

/// The body of a mark.
pub(super) type MarkBody = [u8; 35];

const REASONS: [Incomplete; 7] = [
    Incomplete::Gap,
    Incomplete::JoinedLate,
    Incomplete::Undecodable,
    Incomplete::ForeignRank,
    Incomplete::Uncounted,
    Incomplete::Withdrawn,
    Incomplete::Full,
];

/// Makes the body of a mark: 0 for a complete stream, or the reason's place after it.
pub(super) fn mark_body(mark: &Mark, incomplete: Option<(SystemTime, Incomplete)>) -> MarkBody {
    let (since, why) = incomplete.map_or((0, 0), |(since, why)| {
        let since = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        (since, 1 + place_of(&REASONS, &why))
    });
    let mut body = [0; size_of::<MarkBody>()];
    body[0] = MARK;
    body[1..9].copy_from_slice(&mark.sequence.to_le_bytes());
    body[9] = u8::from(mark.time.is_some());
    body[10..18].copy_from_slice(&mark.time.unwrap_or(0.0).to_bits().to_le_bytes());
    body[18..26].copy_from_slice(&mark.digest.to_le_bytes());
    body[26] = why;
    body[27..].copy_from_slice(&since.to_le_bytes());
    body
}

/// Fields that are left of a body.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.first_chunk().copied()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A value that is there or not, from a byte that says so.
    fn optional<T>(&mut self, value: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        let is_some = self.u8()?;
        let value = value(self)?;
        match is_some {
            0 => Some(None),
            1 => Some(Some(value)),
            _ => None,
        }
    }

    fn tier(&mut self) -> Option<TierType> {
        TierType::try_from(i32::from(self.u8()?)).ok().filter(|tier| *tier != TierType::TierUnknown)
    }

    fn action(&mut self) -> Option<ExternalKvAction> {
        let kind = Type::try_from(i32::from(self.u8()?)).ok().filter(|kind| *kind != Type::ActionUnknown)?;
        let tier = self.tier()?;
        let count = self.u32()? as usize;
        if count > HASHES_PER_CALL_MAX || (count == 0) != (kind == Type::ActionClearAllAtTier) {
            return None;
        }
        let (hashes, _) = self.take(8 * count)?.as_chunks::<8>();
        Some(ExternalKvAction {
            r#type: kind.into(),
            tier: tier.into(),
            hashes: hashes.iter().map(|hash| i64::from_le_bytes(*hash)).collect(),
            component_masks: self.column(count)?,
            block_sizes: self.column(count)?,
        })
    }

    fn column(&mut self, count: usize) -> Option<Vec<u32>> {
        match self.u8()? {
            0 => Some(Vec::new()),
            1 => Some(vec![self.u32()?; count]),
            2 => {
                let (values, _) = self.take(4 * count)?.as_chunks::<4>();
                Some(values.iter().map(|value| u32::from_le_bytes(*value)).collect())
            }
            _ => None,
        }
    }

    fn notes(&mut self) -> Option<Vec<Note>> {
        let (mut notes, mut at) = (Vec::new(), None);
        while let Some(tag) = self.u8() {
            match tag {
                CLEARED => notes.push(Note::Cleared),
                SEEN => notes.push(Note::Seen(*DIALECTS.get(usize::from(self.u8()?))?)),
                KIND => {
                    let group = self.u32()?;
                    notes.push(Note::Kind(group, *KINDS.get(usize::from(self.u8()?))?));
                }
                PLACE => {
                    let (tier, group) = (self.tier()?, self.optional(Fields::u32)?);
                    at = Some((tier, group, self.u32()?));
                }
                COPIES => {
                    let (tier, group, block_tokens) = at?;
                    let (hash, count) = (self.u64()?.cast_signed(), self.u32()?);
                    notes.push(Note::Copies { tier, group, block_tokens, hash, count });
                }
                _ => return None,
            }
        }
        Some(notes)
    }

    fn mark(&mut self) -> Option<Entry> {
        let sequence = self.u64()?;
        let time = self.optional(|fields| fields.u64().map(f64::from_bits))?;
        let (digest, why, since) = (self.u64()?, self.u8()?, self.u64()?);
        let incomplete = match why.checked_sub(1) {
            None => None,
            Some(place) => {
                let why = *REASONS.get(usize::from(place))?;
                let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(since))?;
                Some((since, why))
            }
        };
        Some(Entry::Mark(Mark { sequence, time, digest }, incomplete))
    }
}
