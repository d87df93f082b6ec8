//! A cursor over MessagePack that steps over what nobody asked for.
//!
//! It knows the format and nothing of events. Stepping never recurses and
//! allocates nothing: nested values are counted, not entered. A declared length
//! is checked against the bytes that are left, so a lying one is found at once.
//!
//! Cost: engines send two to a thousand token ids for each block hash, and none
//! is needed, so a batch costs what stepping over integers costs. Looking each
//! marker's length up makes a chain of two dependent loads a token, about 10
//! cycles. Token ids are nearly all of 2 or 4 bytes (markers `cd` and `ce`), for
//! which the length is `3 + (marker & 2)`, and two of them fit in 8 bytes: one
//! load and a few register operations for two tokens.

use rmp::Marker;
use rmp::decode::{self, NumValueReadError, ValueReadError};

/// The bytes are cut off, or hold a marker the format does not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// Bytes not read yet. Values that are asked for by the wrong type stay unread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'p> {
    rest: &'p [u8],
}

impl<'p> Cursor<'p> {
    pub(super) fn new(bytes: &'p [u8]) -> Self {
        Cursor { rest: bytes }
    }

    /// Bytes not read yet, the length of which tells where the cursor is.
    pub(super) fn rest(&self) -> &'p [u8] {
        self.rest
    }

    pub(super) fn marker(&self) -> Result<Marker, Malformed> {
        self.rest.first().map(|byte| Marker::from_u8(*byte)).ok_or(Malformed)
    }

    /// Enters an array and returns its length; `None` when the value is none.
    pub(super) fn array(&mut self) -> Result<Option<u32>, Malformed> {
        self.header(decode::read_array_len)
    }

    /// Enters a map and returns its number of pairs; `None` when the value is none.
    pub(super) fn map(&mut self) -> Result<Option<u32>, Malformed> {
        self.header(decode::read_map_len)
    }

    /// Reads a string's bytes; `None` when the value is none.
    pub(super) fn string(&mut self) -> Result<Option<&'p [u8]>, Malformed> {
        let length = self.header(decode::read_str_len)?;
        length.map(|length| self.take(length as usize)).transpose()
    }

    /// Reads a byte string; `None` when the value is none.
    pub(super) fn bytes(&mut self) -> Result<Option<&'p [u8]>, Malformed> {
        let length = self.header(decode::read_bin_len)?;
        length.map(|length| self.take(length as usize)).transpose()
    }

    /// Reads an integer of any width; `None` when the value is none. Unsigned
    /// ones over `i64::MAX` keep their bits.
    #[inline]
    pub(super) fn integer(&mut self) -> Result<Option<Integer>, Malformed> {
        // The width of nearly every hash, ahead of the general reading.
        if let Some((&marker @ (0xcf | 0xd3), tail)) = self.rest.split_first()
            && let Some((word, rest)) = tail.split_first_chunk::<8>()
        {
            self.rest = rest;
            let bits = i64::from_be_bytes(*word);
            return Ok(Some(Integer { bits, negative: marker == 0xd3 && bits < 0 }));
        }
        self.any_integer()
    }

    fn any_integer(&mut self) -> Result<Option<Integer>, Malformed> {
        let mut ahead = self.rest;
        let integer = match decode::read_int::<i64, _>(&mut ahead) {
            Ok(value) => Integer { bits: value, negative: value < 0 },
            Err(NumValueReadError::TypeMismatch(_)) => return Ok(None),
            // Cut off: the wide unsigned ones were read above.
            Err(_) => return Err(Malformed),
        };
        self.rest = ahead;
        Ok(Some(integer))
    }

    /// Reads nil if that is the value.
    pub(super) fn nil(&mut self) -> Result<bool, Malformed> {
        let is_nil = self.marker()? == Marker::Null;
        if is_nil {
            self.rest = &self.rest[1..];
        }
        Ok(is_nil)
    }

    /// Steps over one value and returns a cursor to it.
    pub(super) fn value(&mut self) -> Result<Cursor<'p>, Malformed> {
        let value = *self;
        self.skip(1)?;
        Ok(value)
    }

    /// Steps over `values` values, with all that is in them.
    pub(super) fn skip(&mut self, values: u64) -> Result<(), Malformed> {
        let end = extent(self.rest, values).ok_or(Malformed)?;
        self.rest = self.rest.get(end..).ok_or(Malformed)?;
        Ok(())
    }

    fn take(&mut self, length: usize) -> Result<&'p [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Malformed)?;
        self.rest = rest;
        Ok(taken)
    }

    fn header<E: decode::RmpReadErr>(
        &mut self,
        read: impl FnOnce(&mut &'p [u8]) -> Result<u32, ValueReadError<E>>,
    ) -> Result<Option<u32>, Malformed> {
        let mut ahead = self.rest;
        match read(&mut ahead) {
            Ok(length) => {
                self.rest = ahead;
                Ok(Some(length))
            }
            Err(ValueReadError::TypeMismatch(Marker::Reserved)) => Err(Malformed),
            Err(ValueReadError::TypeMismatch(_)) => Ok(None),
            Err(_) => Err(Malformed),
        }
    }
}

/// An integer as the wire has it: 64 bits, and whether they are a negative number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Integer {
    /// The value's bits, an unsigned one over `i64::MAX` reinterpreted.
    pub(super) bits: i64,
    negative: bool,
}

impl Integer {
    /// The value, unless it is negative or wider than 32 bits.
    pub(super) fn to_u32(self) -> Option<u32> {
        if self.negative { None } else { u32::try_from(self.bits.cast_unsigned()).ok() }
    }

    /// Whether the value is below 0.
    pub(super) fn is_negative(self) -> bool {
        self.negative
    }

    /// The value, unless it is over `i64::MAX`.
    pub(super) fn to_i64(self) -> Option<i64> {
        (self.negative || self.bits >= 0).then_some(self.bits)
    }
}

/// Bytes of a value whose length its marker alone tells, marker included; 0 for
/// the others.
const LENGTHS: [u8; 256] = lengths();

const fn lengths() -> [u8; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match Marker::from_u8(byte as u8) {
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => 1,
            Marker::U8 | Marker::I8 => 2,
            Marker::U16 | Marker::I16 | Marker::FixExt1 => 3,
            Marker::FixExt2 => 4,
            Marker::U32 | Marker::I32 | Marker::F32 => 5,
            Marker::FixExt4 => 6,
            Marker::U64 | Marker::I64 | Marker::F64 => 9,
            Marker::FixExt8 => 10,
            Marker::FixExt16 => 18,
            Marker::FixStr(length) => 1 + length,
            _ => 0,
        };
        byte += 1;
    }
    table
}

/// Whether the marker is that of a 2- or 4-byte unsigned integer.
#[inline]
fn is_token(marker: u8) -> bool {
    marker == 0xcd || marker == 0xce
}

/// Bytes that the first `values` values take; may pass the end when the last is cut off.
fn extent(bytes: &[u8], mut values: u64) -> Option<usize> {
    let mut at = 0_usize;
    while values > 0 {
        while values >= 2
            && let Some(word) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>())
        {
            let word = u64::from_le_bytes(*word);
            let first = 3 + (word & 2);
            let second = (word >> (8 * first)) as u8;
            if !(is_token(word as u8) && is_token(second)) {
                break;
            }
            at += (first + 3 + u64::from(second & 2)) as usize;
            values -= 2;
        }
        if values == 0 {
            break;
        }
        let length = LENGTHS[usize::from(*bytes.get(at)?)];
        values -= 1;
        if length != 0 {
            at += usize::from(length);
            continue;
        }
        let (length, inside) = open(&bytes[at..])?;
        at = at.checked_add(length)?;
        values += inside;
        // Every value takes a byte at least.
        if values > bytes.len().saturating_sub(at) as u64 {
            return None;
        }
    }
    Some(at)
}

/// Length of a value's head and flat body, and the number of values inside it.
fn open(bytes: &[u8]) -> Option<(usize, u64)> {
    let (&marker, tail) = bytes.split_first()?;
    let one = || tail.first().map(|byte| usize::from(*byte));
    let two = || tail.first_chunk::<2>().map(|raw| usize::from(u16::from_be_bytes(*raw)));
    let four = || tail.first_chunk::<4>().map(|raw| u32::from_be_bytes(*raw));
    let wide = || four().and_then(|length| usize::try_from(length).ok());
    Some(match Marker::from_u8(marker) {
        Marker::FixArray(length) => (1, u64::from(length)),
        Marker::FixMap(length) => (1, 2 * u64::from(length)),
        Marker::Array16 => (3, two()? as u64),
        Marker::Array32 => (5, u64::from(four()?)),
        Marker::Map16 => (3, 2 * two()? as u64),
        Marker::Map32 => (5, 2 * u64::from(four()?)),
        Marker::Str8 | Marker::Bin8 => (2 + one()?, 0),
        Marker::Str16 | Marker::Bin16 => (3 + two()?, 0),
        Marker::Str32 | Marker::Bin32 => (wide()?.checked_add(5)?, 0),
        Marker::Ext8 => (3 + one()?, 0),
        Marker::Ext16 => (4 + two()?, 0),
        Marker::Ext32 => (wide()?.checked_add(6)?, 0),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step(bytes: &[u8]) -> Result<usize, Malformed> {
        let mut cursor = Cursor::new(bytes);
        cursor.skip(1)?;
        Ok(bytes.len() - cursor.rest().len())
    }

    #[test]
    fn every_kind_of_value_is_stepped_over_whole() {
        let rows: &[(&[u8], usize)] = &[
            (&[0x05], 1),
            (&[0xff], 1),
            (&[0xc0], 1),
            (&[0xcc, 200], 2),
            (&[0xcd, 1, 2], 3),
            (&[0xce, 1, 2, 3, 4], 5),
            (&[0xcf, 1, 2, 3, 4, 5, 6, 7, 8], 9),
            (&[0xca, 1, 2, 3, 4], 5),
            (&[0xa3, b'a', b'b', b'c'], 4),
            (&[0xd9, 1, b'a'], 3),
            (&[0xda, 0, 1, b'a'], 4),
            (&[0xdb, 0, 0, 0, 1, b'a'], 6),
            (&[0xc4, 2, 1, 2], 4),
            (&[0xc5, 0, 1, 2], 4),
            (&[0xc6, 0, 0, 0, 1, 2], 6),
            (&[0xd4, 1, 2], 3),
            (&[0xd5, 1, 2, 3], 4),
            (&[0xd8, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 18),
            (&[0xc7, 1, 9, 2], 4),
            (&[0xc8, 0, 1, 9, 2], 5),
            (&[0xc9, 0, 0, 0, 1, 9, 2], 7),
            (&[0x92, 1, 0x91, 2], 4),
            (&[0xdc, 0, 2, 1, 2], 5),
            (&[0xdd, 0, 0, 0, 1, 0xcd, 0, 1], 8),
            (&[0x81, 1, 0x90], 3),
            (&[0xde, 0, 1, 1, 2], 5),
            (&[0xdf, 0, 0, 0, 1, 1, 2], 7),
        ];
        for (bytes, length) in rows {
            assert_eq!(step(bytes), Ok(*length), "{bytes:02x?}");
            for cut in 0..bytes.len() {
                assert_eq!(step(&bytes[..cut]), Err(Malformed), "{bytes:02x?} cut at {cut}");
            }
        }
        assert_eq!(step(&[0xc1]), Err(Malformed));
    }

    #[test]
    fn declared_lengths_and_depth_cost_nothing() {
        assert_eq!(step(&[0xdd, 0xff, 0xff, 0xff, 0xff]), Err(Malformed));
        assert_eq!(step(&[0xdf, 0xff, 0xff, 0xff, 0xff, 1]), Err(Malformed));
        assert_eq!(step(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]), Err(Malformed));
        let mut deep = vec![0x91; 1_000_000];
        assert_eq!(step(&deep), Err(Malformed));
        deep.push(0xc0);
        assert_eq!(step(&deep), Ok(deep.len()));
    }

    proptest! {
        #[test]
        fn token_ids_of_any_width_are_stepped_over(tokens in prop::collection::vec(any::<(u64, u8)>(), 0..200)) {
            let mut bytes = Vec::new();
            rmp::encode::write_array_len(&mut bytes, tokens.len() as u32).unwrap();
            for (token, shift) in &tokens {
                rmp::encode::write_uint(&mut bytes, token >> (shift & 63)).unwrap();
            }
            let length = bytes.len();
            bytes.extend([0xcd; 16]);
            prop_assert_eq!(step(&bytes), Ok(length));
            prop_assert_eq!(step(&bytes[..length]), Ok(length));
            if !tokens.is_empty() {
                prop_assert_eq!(step(&bytes[..length - 1]), Err(Malformed));
            }
        }

        #[test]
        fn integers_read_as_rmp_reads_them(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let mut cursor = Cursor::new(&bytes);
            let wide = decode::read_int::<i128, _>(&mut &bytes[..]);
            match cursor.integer() {
                Ok(Some(integer)) => prop_assert_eq!(wide.unwrap() as i64, integer.bits),
                Ok(None) => prop_assert!(matches!(wide, Err(NumValueReadError::TypeMismatch(_)))),
                Err(Malformed) => prop_assert!(wide.is_err()),
            }
        }
    }
}
