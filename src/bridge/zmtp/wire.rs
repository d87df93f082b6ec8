//! The bytes of ZMTP 3: greeting, commands and frames, read as they come in.
//!
//! Pure: it knows no socket and no clock. What a header declares is a claim of
//! the peer's, so nothing is reserved for it: a frame's bytes pile up as they
//! arrive and are handed on, uncopied, once all are there.
//!
//! Bounds: a message is at most [`MESSAGE_BYTES_MAX`] long and has at most
//! [`FRAMES_MAX`] frames, a command is at most [`COMMAND_BYTES_MAX`] long. Beyond
//! that the peer is no engine and its connection is of no use.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Longest message, over its frames: the largest batch that engines send, two
/// million tokens in one event, is a sixth of it.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Most frames of a message; a batch has at most four.
pub const FRAMES_MAX: usize = 16;

/// Longest command; READY with a routing id of 255 bytes is shorter.
pub const COMMAND_BYTES_MAX: usize = 4 * 1024;

/// Length of the greeting.
pub const GREETING_BYTES: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection's bytes cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireError {
    /// It does not begin as ZMTP does.
    Greeting,
    /// An older protocol than ZMTP 3.
    Version(u8),
    /// It asks for a security mechanism other than NULL.
    Mechanism,
    /// A frame header has bits that mean nothing, or a length past 2^63.
    Header,
    /// A message or command is longer than its bound, or has too many frames.
    TooLong,
    /// A command is no command, or not the one that must come now.
    Command,
    /// The peer's socket is of a kind that does not fit.
    SocketType,
    /// The peer turned the connection down.
    Refused,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Greeting => f.write_str("the peer does not speak ZMTP"),
            WireError::Version(major) => write!(f, "the peer speaks ZMTP {major}, not 3"),
            WireError::Mechanism => f.write_str("the peer asks for a security mechanism other than NULL"),
            WireError::Header => f.write_str("a frame's header is none"),
            WireError::TooLong => f.write_str("a message is longer than a batch can be"),
            WireError::Command => f.write_str("an unfit command"),
            WireError::SocketType => f.write_str("the peer's socket is of another kind"),
            WireError::Refused => f.write_str("the peer turned the connection down"),
        }
    }
}

impl std::error::Error for WireError {}

/// What a peer sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// All frames of one message.
    Message(Vec<Bytes>),
    /// One command's body.
    Command(Bytes),
}

/// Takes a connection's bytes and gives its messages and commands.
#[derive(Debug, Default)]
pub struct Reader {
    /// Bytes that arrived and are not read yet.
    pub(super) buffer: BytesMut,
    frames: Vec<Bytes>,
    /// Bytes of `frames`.
    held: usize,
}

impl Reader {
    /// Takes bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The peer's minor version, once its whole greeting is there.
    ///
    /// # Errors
    /// The peer does not speak ZMTP 3 with the NULL mechanism. Told as soon as its first byte shows it.
    pub fn greeting(&mut self) -> Result<Option<u8>, WireError> {
        let seen = &self.buffer[..];
        let is = |at: usize, byte: u8| seen.get(at).is_none_or(|seen| *seen == byte);
        // The eight bytes between are the length field of older protocols and carry no meaning.
        if !is(0, 0xff) || !is(9, 0x7f) {
            return Err(WireError::Greeting);
        }
        if let Some(major) = seen.get(10).copied().filter(|major| *major < 3) {
            return Err(WireError::Version(major));
        }
        let Some(greeting) = seen.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
        if &greeting[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
            return Err(WireError::Mechanism);
        }
        // A later major speaks this one on request, so it counts as the latest minor.
        let minor = if greeting[10] > 3 { u8::MAX } else { greeting[11] };
        self.buffer.advance(GREETING_BYTES);
        Ok(Some(minor))
    }

    /// The next message or command that is there whole.
    ///
    /// # Errors
    /// The bytes are no frames or pass a bound; what follows them means nothing.
    pub fn item(&mut self) -> Result<Option<Item>, WireError> {
        loop {
            let Some(header) = header(&self.buffer)? else { return Ok(None) };
            let room =
                if header.command { COMMAND_BYTES_MAX } else { MESSAGE_BYTES_MAX.saturating_sub(self.held) };
            if header.length > room as u64 || (!header.command && self.frames.len() == FRAMES_MAX) {
                return Err(WireError::TooLong);
            }
            // Within a bound that fits, as was just checked.
            let length = header.length as usize;
            if self.buffer.len() < header.bytes + length {
                return Ok(None);
            }
            self.buffer.advance(header.bytes);
            let body = self.buffer.split_to(length).freeze();
            if header.command {
                return Ok(Some(Item::Command(body)));
            }
            self.held += length;
            self.frames.push(body);
            if !header.more {
                self.held = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.frames))));
            }
        }
    }
}

struct Header {
    more: bool,
    command: bool,
    length: u64,
    bytes: usize,
}

fn header(buffer: &[u8]) -> Result<Option<Header>, WireError> {
    let [flags, rest @ ..] = buffer else { return Ok(None) };
    let (more, command) = (flags & MORE != 0, flags & COMMAND != 0);
    if flags & !(MORE | LONG | COMMAND) != 0 || (more && command) {
        return Err(WireError::Header);
    }
    if flags & LONG == 0 {
        return Ok(rest.first().map(|length| Header { more, command, length: u64::from(*length), bytes: 2 }));
    }
    let Some(length) = rest.first_chunk::<8>() else { return Ok(None) };
    let length = u64::from_be_bytes(*length);
    if length >> 63 != 0 {
        return Err(WireError::Header);
    }
    Ok(Some(Header { more, command, length, bytes: 9 }))
}

/// The greeting of a peer that speaks ZMTP 3.1 with the NULL mechanism.
pub fn write_greeting(out: &mut BytesMut) {
    out.put_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
    out.put_slice(b"NULL");
    out.put_bytes(0, GREETING_BYTES - 16);
}

fn write_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.put_slice(&[flags, length]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

/// One message of these frames.
pub fn write_message(out: &mut BytesMut, frames: &[&[u8]]) {
    let last = frames.len().saturating_sub(1);
    for (index, frame) in frames.iter().enumerate() {
        write_frame(out, if index == last { 0 } else { MORE }, frame);
    }
}

/// READY, with this socket type.
pub fn write_ready(out: &mut BytesMut, socket_type: &str) {
    let mut body = BytesMut::new();
    body.put_slice(b"\x05READY\x0bSocket-Type");
    body.put_u32(socket_type.len() as u32);
    body.put_slice(socket_type.as_bytes());
    write_frame(out, COMMAND, &body);
}

/// PING without a time to live: whether a silence is too long is each side's own affair.
pub fn write_ping(out: &mut BytesMut) {
    write_frame(out, COMMAND, b"\x04PING\0\0");
}

/// Answers a PING; `context` is what that carried.
pub fn write_pong(out: &mut BytesMut, context: &[u8]) {
    let mut body = BytesMut::from(&b"\x04PONG"[..]);
    body.put_slice(context);
    write_frame(out, COMMAND, &body);
}

/// A command, as far as a client of an engine needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command<'b> {
    /// The handshake's end, with the peer's socket type.
    Ready(&'b [u8]),
    /// The peer turns the connection down.
    Error,
    /// The peer wants a PONG with this context.
    Ping(&'b [u8]),
    /// An answer to a PING, or a command that does not matter here.
    Other,
}

/// Reads a command's body.
///
/// # Errors
/// It is cut off.
pub fn command(body: &[u8]) -> Result<Command<'_>, WireError> {
    let (name, rest) = short(body).ok_or(WireError::Command)?;
    match name {
        b"READY" => socket_type(rest).map(Command::Ready),
        b"ERROR" => Ok(Command::Error),
        // Two bytes of time to live, then at most 16 of context.
        b"PING" => {
            let context = rest.get(2..).filter(|context| context.len() <= 16);
            context.map(Command::Ping).ok_or(WireError::Command)
        }
        _ => Ok(Command::Other),
    }
}

/// A text led by its length in one byte, and what follows.
fn short(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

fn socket_type(mut properties: &[u8]) -> Result<&[u8], WireError> {
    let mut found = None;
    while !properties.is_empty() {
        let (name, rest) = short(properties).ok_or(WireError::Command)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or(WireError::Command)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| WireError::Command)?;
        let (value, rest) = rest.split_at_checked(length).ok_or(WireError::Command)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
        properties = rest;
    }
    found.ok_or(WireError::SocketType)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn items(reader: &mut Reader) -> Result<Vec<Item>, WireError> {
        let mut items = Vec::new();
        while let Some(item) = reader.item()? {
            items.push(item);
        }
        Ok(items)
    }

    #[test]
    fn a_declared_length_reserves_nothing() {
        for length in [1 << 62, MESSAGE_BYTES_MAX as u64 + 1, u64::MAX] {
            let mut reader = Reader::default();
            reader.push(&[LONG]);
            reader.push(&length.to_be_bytes());
            assert!(reader.item().is_err(), "{length}");
        }
        let mut reader = Reader::default();
        reader.push(&[LONG]);
        reader.push(&(MESSAGE_BYTES_MAX as u64).to_be_bytes());
        assert_eq!(reader.item(), Ok(None));
        assert!(reader.buffer.capacity() < 1_024);
    }

    #[test]
    fn a_message_is_bounded_over_its_frames() {
        let mut reader = Reader::default();
        let (mut wire, piece) = (BytesMut::new(), vec![0; MESSAGE_BYTES_MAX / 2]);
        write_message(&mut wire, &[&piece, &piece]);
        reader.push(&wire);
        assert_eq!(items(&mut reader).map(|items| items.len()), Ok(1));
        wire.clear();
        write_message(&mut wire, &[&piece, &piece, b"x"]);
        reader.push(&wire);
        assert_eq!(items(&mut reader), Err(WireError::TooLong));
        let mut reader = Reader::default();
        reader.push(&[MORE, 0].repeat(FRAMES_MAX + 1));
        assert_eq!(items(&mut reader), Err(WireError::TooLong));
    }

    #[test]
    fn greetings_of_other_protocols_are_told() {
        let mut greeting = BytesMut::new();
        write_greeting(&mut greeting);
        assert_eq!(greeting.len(), GREETING_BYTES);
        let rows: [(usize, u8, Result<Option<u8>, WireError>); 6] = [
            (11, 0, Ok(Some(0))),
            (11, 1, Ok(Some(1))),
            (10, 4, Ok(Some(u8::MAX))),
            (10, 1, Err(WireError::Version(1))),
            (0, b'H', Err(WireError::Greeting)),
            (12, b'P', Err(WireError::Mechanism)),
        ];
        for (at, byte, expected) in rows {
            let mut reader = Reader::default();
            reader.push(&greeting);
            reader.buffer[at] = byte;
            assert_eq!(reader.greeting(), expected, "{at} {byte}");
        }
    }

    #[test]
    fn commands_are_read_and_cut_ones_refused() {
        assert_eq!(
            command(b"\x05READY\x08Identity\0\0\0\x01x\x0bsocket-type\0\0\0\x03PUB"),
            Ok(Command::Ready(b"PUB"))
        );
        assert_eq!(command(b"\x05READY"), Err(WireError::SocketType));
        assert_eq!(command(b"\x05READY\x0bSocket-Type\xff\xff\xff\xff"), Err(WireError::Command));
        assert_eq!(command(b"\x04PING\0\x01abc"), Ok(Command::Ping(b"abc")));
        assert_eq!(command(b"\x04PING\0"), Err(WireError::Command));
        assert_eq!(command(b"\x04PONGabc"), Ok(Command::Other));
        assert_eq!(command(b"\x05ERROR\x02no"), Ok(Command::Error));
        assert_eq!(command(b"\x09PING"), Err(WireError::Command));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_however_it_is_cut(
            messages in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..5), 0..6),
            cut in 1_usize..300,
        ) {
            let mut wire = BytesMut::new();
            for message in &messages {
                write_message(&mut wire, &message.iter().map(Vec::as_slice).collect::<Vec<_>>());
                write_ping(&mut wire);
            }
            let mut reader = Reader::default();
            let mut found = Vec::new();
            for piece in wire.chunks(cut) {
                reader.push(piece);
                found.extend(items(&mut reader).expect("frames"));
            }
            let found: Vec<Vec<Vec<u8>>> = found.into_iter().filter_map(|item| match item {
                Item::Message(frames) => Some(frames.iter().map(|frame| frame.to_vec()).collect()),
                Item::Command(_) => None,
            }).collect();
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn random_bytes_never_panic_nor_grow(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..20),
        ) {
            let mut reader = Reader::default();
            let mut arrived = 0;
            for piece in &pieces {
                reader.push(piece);
                arrived += piece.len();
                match items(&mut reader) {
                    Ok(items) => for item in &items {
                        if let Item::Command(body) = item {
                            let _ = command(body);
                        }
                    },
                    Err(_) => break,
                }
            }
            prop_assert!(reader.buffer.capacity() <= 2 * arrived + 1_024);
            let mut reader = Reader::default();
            pieces.iter().for_each(|piece| reader.push(piece));
            let _ = reader.greeting();
        }
    }
}
