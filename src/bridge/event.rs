//! An engine's batch of events, in any dialect, as plain changes in exact order.
//!
//! The shape decides, never the engine or its version: an event is an array
//! led by its tag or a map with the tag under `type`, keys in any order, and what
//! this crate does not know is stepped over. It knows nothing of sockets,
//! sequences or the index.
//!
//! Hashes are 64 bits. Integers, signed or not, keep their bits. Byte strings
//! fold to their last 8 bytes, big-endian, which is the integer that the same
//! engine sends when told to send integers.
//!
//! An event that cannot be understood is left out and its siblings are kept; a
//! batch that is cut off or is no batch is refused whole, so nothing of it is
//! seen. Both are counted: a removal that was lost leaves a placement behind.
//!
//! Cost: one step over the payload (see `msgpack`), a second reading of the
//! hashes, no allocation but the list of events, which is reused and at most
//! [`EVENT_BYTES_RATIO`] times as large as the payload. Hashes are not copied.

use std::fmt;

use rmp::Marker;

use super::msgpack::{Cursor, Integer, Malformed};
use crate::pb::TierType as Tier;

/// Bit of the FULL component.
pub const FULL: u32 = 1;
/// Bit of the SWA component.
pub const SWA: u32 = 2;
/// Bit of the Mamba component.
pub const MAMBA: u32 = 4;

/// What an event does to the placements of its stream's worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The blocks are held at the tier, with these components (0: whole blocks).
    Stored {
        /// Where.
        tier: Tier,
        /// Component bits.
        mask: u32,
        /// Tokens per block, 0 when not told.
        block_tokens: u32,
    },
    /// The blocks are no longer held at the tier.
    Removed {
        /// Where.
        tier: Tier,
    },
    /// Nothing is held at any tier.
    Cleared,
}

/// Kind of cache that a vLLM cache group is, from its stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Attention over the whole prefix.
    Full,
    /// Attention over a sliding window.
    SlidingWindow,
    /// A recurrent state.
    Mamba,
    /// One that the contract has no component for.
    Other,
}

/// The engine that a value of an event gives away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// A negative hash, a list or map after the medium, or a key that only SGLang has.
    Sglang,
    /// A hash in bytes or past `i64::MAX`, a group, or a value that only vLLM sends.
    Vllm,
}

/// One event. Its hashes are in the payload: [`Batch::hashes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What it does.
    pub change: Change,
    /// Cache group of a hybrid vLLM model.
    pub group: Option<u32>,
    /// That group's kind, where the event says it.
    pub kind: Option<GroupKind>,
    /// Number of hashes; never 0 but for a clear.
    pub hashes: u32,
    /// Invariant: `hashes` integers, or byte strings of 8 bytes or more, start here in the payload.
    hashes_at: usize,
}

/// Most bytes of the list of events per byte of payload: the shortest event that
/// is kept, a clear in an array, takes 18 bytes.
pub const EVENT_BYTES_RATIO: usize = 3;
const _: () = assert!(size_of::<Event>() <= 18 * EVENT_BYTES_RATIO);

/// Why an event was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventError {
    /// Neither an array nor a map that holds a tag.
    Untagged,
    /// The hashes are missing, not a list, or one is no integer or byte string of 8 bytes or more.
    Hashes,
    /// The block size is no integer of 32 bits.
    BlockSize,
    /// The medium is no string.
    Medium,
    /// The components are no list of strings.
    Components,
    /// The group is no integer of 32 bits, or its kind no string.
    Group,
}

impl fmt::Display for EventError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EventError::Untagged => "it is neither an array nor a map that holds a tag",
            EventError::Hashes => {
                "its block hashes are no list of integers or of byte strings of 8 bytes or more"
            }
            EventError::BlockSize => "its block size is no 32-bit integer",
            EventError::Medium => "its medium is no string",
            EventError::Components => "its component types are no list of strings",
            EventError::Group => "its group is no 32-bit integer, or the group's kind no string",
        })
    }
}

/// Why a whole batch was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchError {
    /// The MessagePack is cut off, declares more than is there, or has a marker that is never used.
    Malformed,
    /// It is no array of a time, a list of events and more.
    Shape,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BatchError::Malformed => "the payload is cut off or is no MessagePack",
            BatchError::Shape => "the payload is no array of a time and a list of events",
        })
    }
}

impl std::error::Error for BatchError {}

impl From<Malformed> for BatchError {
    fn from(Malformed: Malformed) -> Self {
        BatchError::Malformed
    }
}

/// What of a batch was left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Events that could not be understood.
    pub undecodable: u64,
    /// The first one's reason.
    pub first_error: Option<EventError>,
    /// Events with a tag of no known event.
    pub unknown_tags: u64,
    /// Events at a medium that is no local tier.
    pub unknown_media: u64,
    /// Component names of no known component; their events are kept.
    pub unknown_components: u64,
    /// Stores for a group of [`GroupKind::Other`]; their events are kept.
    pub unknown_groups: u64,
}

/// A decoded batch, over the payload it came in.
#[derive(Debug)]
pub struct Batch<'d, 'p> {
    /// Data-parallel rank of the sender, where it says so.
    pub rank: Option<i64>,
    /// In the order they happened.
    pub events: &'d [Event],
    /// What is missing from them.
    pub left_out: LeftOut,
    /// Whose events they are, where a value tells.
    pub dialect: Option<Dialect>,
    payload: &'p [u8],
}

impl<'p> Batch<'_, 'p> {
    /// The hashes of one of this batch's events.
    pub fn hashes(&self, event: &Event) -> Hashes<'p> {
        let at = self.payload.get(event.hashes_at..).unwrap_or_default();
        Hashes { at: Cursor::new(at), left: event.hashes }
    }
}

/// Hashes of one event, read off the payload one by one.
#[derive(Debug, Clone)]
pub struct Hashes<'p> {
    at: Cursor<'p>,
    left: u32,
}

impl Iterator for Hashes<'_> {
    type Item = i64;

    #[inline]
    fn next(&mut self) -> Option<i64> {
        self.left = self.left.checked_sub(1)?;
        read_hash(&mut self.at).ok()?
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left as usize, Some(self.left as usize))
    }
}

impl ExactSizeIterator for Hashes<'_> {}

/// Reads one hash; `None` when the value is none.
#[inline]
fn read_hash(cursor: &mut Cursor<'_>) -> Result<Option<i64>, Malformed> {
    if let Some(Integer { bits, .. }) = cursor.integer()? {
        return Ok(Some(bits));
    }
    let bytes = cursor.bytes()?;
    Ok(bytes.and_then(|bytes| bytes.last_chunk::<8>()).map(|last| i64::from_be_bytes(*last)))
}

/// When a batch was made, in seconds, as its publisher says; `None` where it does not.
pub fn time_of(payload: &[u8]) -> Option<f64> {
    let mut cursor = Cursor::new(payload);
    cursor.array().ok()??;
    match cursor.rest() {
        [0xcb, time @ ..] => time.first_chunk::<8>().map(|time| f64::from_be_bytes(*time)),
        _ => None,
    }
}

/// Decodes batches, reusing the memory of the last one.
#[derive(Debug, Default)]
pub struct Decoder {
    events: Vec<Event>,
}

impl Decoder {
    /// Decodes one payload.
    ///
    /// # Errors
    /// The payload is no batch; then none of its events counts.
    pub fn decode<'p>(&mut self, payload: &'p [u8]) -> Result<Batch<'_, 'p>, BatchError> {
        self.events.clear();
        let mut cursor = Cursor::new(payload);
        let fields = cursor.array()?.ok_or(BatchError::Shape)?;
        if fields < 2 {
            return Err(BatchError::Shape);
        }
        cursor.skip(1)?;
        let count = cursor.array()?.ok_or(BatchError::Shape)?;
        let mut left_out = LeftOut::default();
        let mut dialect = None;
        for _ in 0..count {
            match read_event(&mut cursor, payload.len(), &mut left_out, &mut dialect)? {
                Ok(Some(event)) => self.events.push(event),
                Ok(None) => {}
                Err(error) => {
                    left_out.undecodable += 1;
                    left_out.first_error.get_or_insert(error);
                }
            }
        }
        let mut rank = None;
        if fields > 2 {
            rank = cursor.value()?.integer()?.and_then(Integer::to_i64);
            cursor.skip(u64::from(fields) - 3)?;
        }
        Ok(Batch { rank, events: &self.events, left_out, dialect, payload })
    }
}

/// Where an event's values are, whichever way it is laid out.
#[derive(Debug, Default)]
struct Fields<'p> {
    tag: &'p [u8],
    hashes: Option<Cursor<'p>>,
    block_size: Option<Cursor<'p>>,
    medium: Option<Cursor<'p>>,
    components: Option<Cursor<'p>>,
    group: Option<Cursor<'p>>,
    kind: Option<Cursor<'p>>,
    dialect: Option<Dialect>,
}

/// What the first hash of a list gives away: SGLang's are signed, vLLM's unsigned or in bytes.
fn dialect_of_hashes(mut list: Cursor<'_>) -> Option<Dialect> {
    if list.array().ok()?? == 0 {
        return None;
    }
    match list.integer().ok()? {
        Some(hash) if hash.is_negative() => Some(Dialect::Sglang),
        Some(hash) => (hash.bits < 0).then_some(Dialect::Vllm),
        None => list.bytes().ok()?.map(|_| Dialect::Vllm),
    }
}

/// Reads one event, always to its end. The outer error is the batch's.
fn read_event(
    cursor: &mut Cursor<'_>,
    payload_len: usize,
    left_out: &mut LeftOut,
    dialect: &mut Option<Dialect>,
) -> Result<Result<Option<Event>, EventError>, Malformed> {
    let fields = if let Some(length) = cursor.array()? {
        read_array(cursor, length)?
    } else if let Some(pairs) = cursor.map()? {
        read_map(cursor, pairs)?
    } else {
        cursor.skip(1)?;
        None
    };
    let Some(fields) = fields else { return Ok(Err(EventError::Untagged)) };
    if dialect.is_none() {
        *dialect = fields.dialect.or_else(|| fields.hashes.and_then(dialect_of_hashes));
    }
    match fields.tag {
        b"BlockStored" => read_change(&fields, true, payload_len, left_out),
        b"BlockRemoved" => read_change(&fields, false, payload_len, left_out),
        b"AllBlocksCleared" => {
            Ok(Ok(Some(Event { change: Change::Cleared, group: None, kind: None, hashes: 0, hashes_at: 0 })))
        }
        _ => {
            left_out.unknown_tags += 1;
            Ok(Ok(None))
        }
    }
}

/// Walks an array event. Which element means what depends on its tag; the one
/// after the medium is a list or map from SGLang, a string from vLLM.
fn read_array<'p>(cursor: &mut Cursor<'p>, length: u32) -> Result<Option<Fields<'p>>, Malformed> {
    let Some(elements) = length.checked_sub(1) else { return Ok(None) };
    let Some(tag) = cursor.string()? else {
        cursor.skip(u64::from(length))?;
        return Ok(None);
    };
    let mut fields = Fields { tag, ..Fields::default() };
    let stored = tag == b"BlockStored";
    for index in 1..=elements.min(10) {
        let value = Some(cursor.value()?);
        match (stored, index) {
            (_, 1) => fields.hashes = value,
            (true, 4) => fields.block_size = value,
            (true, 6) | (false, 2) => fields.medium = value,
            (true, 7) => {
                fields.components = value.filter(is_array);
                fields.dialect = value.and_then(|value| match value.marker() {
                    Ok(marker) if is_string(marker) => Some(Dialect::Vllm),
                    Ok(Marker::Null) | Err(_) => None,
                    Ok(_) => Some(Dialect::Sglang),
                });
            }
            (true, 9) | (false, 3) => {
                fields.group = value;
                fields.dialect = Some(Dialect::Vllm);
            }
            (true, 10) => fields.kind = value,
            _ => {}
        }
    }
    cursor.skip(u64::from(elements.saturating_sub(10)))?;
    Ok(Some(fields))
}

fn is_string(marker: Marker) -> bool {
    matches!(marker, Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32)
}

fn is_array(value: &Cursor<'_>) -> bool {
    matches!(value.marker(), Ok(Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
}

fn read_map<'p>(cursor: &mut Cursor<'p>, pairs: u32) -> Result<Option<Fields<'p>>, Malformed> {
    let mut fields = Fields::default();
    let mut tagged = false;
    for _ in 0..pairs {
        let Some(key) = cursor.string()? else {
            cursor.skip(2)?;
            continue;
        };
        let mut value = cursor.value()?;
        match key {
            b"type" => {
                if let Some(tag) = value.string()? {
                    fields.tag = tag;
                    tagged = true;
                }
            }
            b"block_hashes" => fields.hashes = Some(value),
            b"block_size" => fields.block_size = Some(value),
            b"medium" => fields.medium = Some(value),
            b"component_types" => {
                fields.components = Some(value);
                fields.dialect = Some(Dialect::Sglang);
            }
            b"group_idx" => {
                fields.group = Some(value);
                fields.dialect = Some(Dialect::Vllm);
            }
            b"kv_cache_spec_kind" => fields.kind = Some(value),
            b"cache_salt" => fields.dialect = Some(Dialect::Sglang),
            b"extra_keys" | b"locality" | b"ownership" => fields.dialect = Some(Dialect::Vllm),
            _ => {}
        }
    }
    Ok(tagged.then_some(fields))
}

/// Where a medium puts a block, of those that engines name.
fn tier_of(medium: Option<&[u8]>) -> Option<Tier> {
    match medium {
        // Only events of the device ever came without a medium.
        None | Some(b"GPU") => Some(Tier::TierHbm),
        Some(b"CPU_PINNED" | b"CPU" | b"CPU_TIER1" | b"CPU_TIER2") => Some(Tier::TierDram),
        Some(b"DISK" | b"STORAGE") => Some(Tier::TierSsd),
        Some(_) => None,
    }
}

fn read_change(
    fields: &Fields<'_>,
    stored: bool,
    payload_len: usize,
    left_out: &mut LeftOut,
) -> Result<Result<Option<Event>, EventError>, Malformed> {
    let Some((hashes_at, hashes)) = read_hashes(fields.hashes, payload_len)? else {
        return Ok(Err(EventError::Hashes));
    };
    let Some(medium) = optional(fields.medium, Cursor::string)? else { return Ok(Err(EventError::Medium)) };
    let Some(group) = optional(fields.group, |value| Ok(value.integer()?.and_then(Integer::to_u32)))? else {
        return Ok(Err(EventError::Group));
    };
    let Some(kind) = optional(fields.kind, Cursor::string)? else { return Ok(Err(EventError::Group)) };
    let kind = kind.map(kind_of);
    let mut withdrawn = !stored;
    let (mut mask, mut block_tokens) = (0, 0);
    if stored {
        let Some(size) = optional(fields.block_size, |value| Ok(value.integer()?.and_then(Integer::to_u32)))?
        else {
            return Ok(Err(EventError::BlockSize));
        };
        let Some(components) = optional(fields.components, read_components)? else {
            return Ok(Err(EventError::Components));
        };
        block_tokens = size.unwrap_or(0);
        left_out.unknown_groups += u64::from(kind == Some(GroupKind::Other));
        if let Some(components) = components {
            mask = components.mask;
            left_out.unknown_components += components.unknown;
            // Nothing that can be reused is resident, so the placement goes. A list of unknown names alone says
            // the same as an empty one: mask 0 would claim the whole block.
            withdrawn = mask == 0;
        }
    }
    let Some(tier) = tier_of(medium) else {
        left_out.unknown_media += 1;
        return Ok(Ok(None));
    };
    if hashes == 0 {
        return Ok(Ok(None));
    }
    let change =
        if withdrawn { Change::Removed { tier } } else { Change::Stored { tier, mask, block_tokens } };
    Ok(Ok(Some(Event { change, group, kind, hashes, hashes_at })))
}

/// Reads a value that may be absent or nil. The outer `None` is a value of another type.
#[allow(clippy::option_option, reason = "absent and wrong are different answers, and both are wanted here")]
fn optional<'p, T>(
    value: Option<Cursor<'p>>,
    read: impl FnOnce(&mut Cursor<'p>) -> Result<Option<T>, Malformed>,
) -> Result<Option<Option<T>>, Malformed> {
    let Some(mut value) = value else { return Ok(Some(None)) };
    if value.nil()? {
        return Ok(Some(None));
    }
    Ok(read(&mut value)?.map(Some))
}

/// Checks a list of hashes; returns its place in the payload and its length.
fn read_hashes(value: Option<Cursor<'_>>, payload_len: usize) -> Result<Option<(usize, u32)>, Malformed> {
    let Some(mut list) = value else { return Ok(None) };
    let Some(length) = list.array()? else { return Ok(None) };
    let at = payload_len - list.rest().len();
    for _ in 0..length {
        if read_hash(&mut list)?.is_none() {
            return Ok(None);
        }
    }
    Ok(Some((at, length)))
}

struct Components {
    mask: u32,
    unknown: u64,
}

fn read_components(list: &mut Cursor<'_>) -> Result<Option<Components>, Malformed> {
    let Some(length) = list.array()? else { return Ok(None) };
    let mut components = Components { mask: 0, unknown: 0 };
    for _ in 0..length {
        match list.string()? {
            Some(b"full") => components.mask |= FULL,
            Some(b"swa") => components.mask |= SWA,
            Some(b"mamba") => components.mask |= MAMBA,
            Some(_) => components.unknown += 1,
            None => return Ok(None),
        }
    }
    Ok(Some(components))
}

fn kind_of(name: &[u8]) -> GroupKind {
    match name {
        // MLA and attention with sinks read the whole prefix too.
        b"full_attention" | b"mla_attention" | b"sink_full_attention" => GroupKind::Full,
        _ if name.starts_with(b"sliding_window") => GroupKind::SlidingWindow,
        _ if name.starts_with(b"mamba") => GroupKind::Mamba,
        _ => GroupKind::Other,
    }
}
