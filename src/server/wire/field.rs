//! Fields of a protobuf message, read from [`Bytes`] without copying.
//!
//! A repeated scalar may come packed, one by one, split over several chunks or
//! mixed; all of these are read, and bounds are taken from a [`Room`] before a
//! value is kept. This must not know which message it reads.

use bytes::{Buf, Bytes};
use prost::encoding::{DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field};

use super::RequestError;
use crate::arena::PackedHashes;

/// Bytes of one hash.
const HASH_BYTES: usize = 8;

/// What is left of a bound, shared by all the lists that count towards it.
#[derive(Debug)]
pub(super) struct Room {
    left: usize,
    exceeded: RequestError,
}

impl Room {
    /// Room for `count`; taking more is `exceeded`.
    pub(super) fn new(count: usize, exceeded: RequestError) -> Self {
        Room { left: count, exceeded }
    }

    /// Takes `count` out of what is left.
    pub(super) fn take(&mut self, count: usize) -> Result<(), RequestError> {
        self.left = self.left.checked_sub(count).ok_or_else(|| self.exceeded.clone())?;
        Ok(())
    }
}

/// Hands each field to `read`, which says whether it knows it; skips the others.
pub(super) fn each(
    mut message: Bytes,
    mut read: impl FnMut(u32, WireType, &mut Bytes) -> Result<bool, RequestError>,
) -> Result<(), RequestError> {
    while message.has_remaining() {
        let (tag, wire_type) = decode_key(&mut message)?;
        if !read(tag, wire_type, &mut message)? {
            skip_field(wire_type, tag, &mut message, DecodeContext::default())?;
        }
    }
    Ok(())
}

/// The length-delimited field at the head of `source`, as a slice of it.
pub(super) fn delimited(wire_type: WireType, source: &mut Bytes) -> Result<Bytes, RequestError> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let length = decode_varint(source)?;
    match usize::try_from(length) {
        Ok(length) if length <= source.len() => Ok(source.split_to(length)),
        _ => Err(RequestError::Truncated),
    }
}

/// Appends a repeated `uint32`, in whichever encoding it comes.
pub(super) fn merge_numbers(
    values: &mut Vec<u32>,
    room: &mut Room,
    wire_type: WireType,
    source: &mut Bytes,
) -> Result<(), RequestError> {
    if wire_type != WireType::LengthDelimited {
        check_wire_type(WireType::Varint, wire_type)?;
        room.take(1)?;
        values.push(number(source)?);
        return Ok(());
    }
    let mut chunk = delimited(wire_type, source)?;
    // A value has at least one byte, so neither of both can be passed.
    values.reserve(chunk.len().min(room.left));
    while chunk.has_remaining() {
        room.take(1)?;
        values.push(number(&mut chunk)?);
    }
    Ok(())
}

/// A `uint32`; protobuf cuts wider varints to their low bits.
fn number(source: &mut Bytes) -> Result<u32, RequestError> {
    Ok(decode_varint(source)? as u32)
}

/// A repeated `sfixed64` of block hashes.
///
/// One packed chunk, which is what every encoder writes, stays a slice of the
/// message. Whatever else comes is joined in one buffer, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct HashList {
    /// The only chunk so far, if `joined` is empty. Invariant: whole hashes.
    slice: Bytes,
    /// All chunks, once there are several. Invariant: whole hashes.
    joined: Vec<u8>,
}

impl HashList {
    /// Appends the field at the head of `source`, in whichever encoding it comes.
    pub(super) fn merge(
        &mut self,
        room: &mut Room,
        wire_type: WireType,
        source: &mut Bytes,
    ) -> Result<(), RequestError> {
        let chunk = match wire_type {
            WireType::LengthDelimited => delimited(wire_type, source)?,
            _ => {
                check_wire_type(WireType::SixtyFourBit, wire_type)?;
                if source.len() < HASH_BYTES {
                    return Err(RequestError::Truncated);
                }
                source.split_to(HASH_BYTES)
            }
        };
        if chunk.len() % HASH_BYTES != 0 {
            return Err(RequestError::RaggedHashes { bytes: chunk.len() });
        }
        room.take(chunk.len() / HASH_BYTES)?;
        if self.is_empty() {
            self.slice = chunk;
        } else if !chunk.is_empty() {
            if self.joined.is_empty() {
                self.joined.extend_from_slice(&std::mem::take(&mut self.slice));
            }
            self.joined.extend_from_slice(&chunk);
        }
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        if self.joined.is_empty() { &self.slice } else { &self.joined }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.bytes().len() / HASH_BYTES
    }

    /// The hashes as the index takes them.
    pub(super) fn packed(&self) -> PackedHashes<'_> {
        PackedHashes::new(self.bytes()).expect("invariant of HashList: whole hashes")
    }

    /// Whether the hashes are still a slice of the message.
    #[cfg(test)]
    fn is_slice_of(&self, message: &Bytes) -> bool {
        self.joined.is_empty() && message.as_ptr_range().contains(&self.slice.as_ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAG: u32 = 1;

    fn packed(hashes: &[i64]) -> Vec<u8> {
        let bytes = PackedHashes::pack(hashes);
        let mut field = vec![0x0a];
        prost::encoding::encode_varint(bytes.len() as u64, &mut field);
        field.extend(bytes);
        field
    }

    fn unpacked(hashes: &[i64]) -> Vec<u8> {
        hashes.iter().flat_map(|hash| [vec![0x09], hash.to_le_bytes().to_vec()].concat()).collect()
    }

    fn read(message: &Bytes, room: usize) -> Result<HashList, RequestError> {
        let mut list = HashList::default();
        let mut room = Room::new(room, RequestError::TooManyHashes);
        each(message.clone(), |tag, wire_type, source| match tag {
            TAG => list.merge(&mut room, wire_type, source).map(|()| true),
            _ => Ok(false),
        })?;
        Ok(list)
    }

    #[track_caller]
    fn check(message: &[Vec<u8>], expected: &[i64], slice: bool) {
        let message = Bytes::from(message.concat());
        let list = read(&message, expected.len()).expect("well formed");
        assert!(list.packed().iter().eq(expected.iter().copied()), "{list:?}");
        assert_eq!(list.is_slice_of(&message), slice);
        if let Some(room) = expected.len().checked_sub(1) {
            assert_eq!(read(&message, room).unwrap_err(), RequestError::TooManyHashes);
        }
    }

    #[test]
    fn one_packed_chunk_stays_a_slice() {
        check(&[packed(&[1, -2, i64::MIN])], &[1, -2, i64::MIN], true);
        check(&[packed(&[]), packed(&[7, 8]), packed(&[])], &[7, 8], true);
        check(&[packed(&[]), packed(&[7, 8])], &[7, 8], true);
        check(&[vec![0x10, 5], packed(&[9]), vec![0x1a, 1, 0]], &[9], true);
    }

    #[test]
    fn every_other_encoding_is_joined_in_order() {
        check(&[unpacked(&[1, 2, 3])], &[1, 2, 3], false);
        check(&[packed(&[1]), packed(&[2, 3])], &[1, 2, 3], false);
        check(&[unpacked(&[1]), packed(&[2, 3]), unpacked(&[4])], &[1, 2, 3, 4], false);
        check(&[packed(&[1, 2]), vec![0x10, 5], unpacked(&[3])], &[1, 2, 3], false);
        check(&[], &[], false);
    }

    #[test]
    fn a_ragged_chunk_is_malformed() {
        for length in 1..8_u8 {
            let mut message = vec![0x0a, 8 + length];
            message.extend(vec![0; usize::from(8 + length)]);
            let error = read(&message.into(), 9).unwrap_err();
            assert_eq!(error, RequestError::RaggedHashes { bytes: usize::from(8 + length) });
        }
    }

    #[test]
    fn a_length_past_the_end_is_malformed() {
        let forever = [0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(read(&Bytes::copy_from_slice(&forever), 9).unwrap_err(), RequestError::Truncated);
        assert_eq!(read(&Bytes::from_static(&[0x09, 1, 2]), 9).unwrap_err(), RequestError::Truncated);
    }

    #[test]
    fn unknown_groups_are_skipped_to_a_bounded_depth() {
        let mut message = vec![0x13_u8; 50];
        message.extend([0x14; 50]);
        message.extend(packed(&[3]));
        assert_eq!(read(&message.into(), 9).expect("well formed").len(), 1);
        let deep = vec![0x13_u8; 1_000_000];
        assert!(matches!(read(&deep.into(), 9), Err(RequestError::Malformed(_))));
    }

    #[test]
    fn numbers_are_read_in_every_encoding() {
        let read = |bytes: &'static [u8], room: usize| {
            let mut values = Vec::new();
            let mut room = Room::new(room, RequestError::TooMuchMetadata { field: "values" });
            each(Bytes::from_static(bytes), |_, wire_type, source| {
                merge_numbers(&mut values, &mut room, wire_type, source).map(|()| true)
            })?;
            Ok::<_, RequestError>(values)
        };
        let mixed = b"\x0a\x03\x01\x80\x01\x08\x07\x0a\x00\x0a\x01\x09";
        assert_eq!(read(mixed, 4), Ok(vec![1, 128, 7, 9]));
        assert_eq!(read(mixed, 3), Err(RequestError::TooMuchMetadata { field: "values" }));
        // Wider than 32 bits: the low ones count.
        assert_eq!(read(b"\x08\xff\xff\xff\xff\x1f", 1), Ok(vec![u32::MAX]));
        assert!(matches!(read(b"\x0a\x02\x01\x80", 4), Err(RequestError::Malformed(_))));
        assert!(matches!(read(b"\x0d\0\0\0\0", 4), Err(RequestError::Malformed(_))));
    }
}
