//! Messages as they stand on the wire.
//!
//! Requests are read from the received bytes in place: hashes stay slices of
//! the buffer and bounds bite while decoding, so that a hostile message costs no
//! more than a small multiple of itself. Answers are written once, as bytes.
//! What comes out of here is valid by its type; nothing behind it checks again.
//! This must not know the runtime, the lock or what an action does.
//!
//! Errors come in this order: malformed bytes and exceeded bounds as decoding
//! meets them, then the fields in the order of the contract. A field of a known
//! number in another wire type is malformed; an unknown field is skipped.

mod answer;
mod field;
mod request;

use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes};
use prost::DecodeError;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

pub(super) use answer::{applied, block_matches, hit_counts, prefix_matches};
pub(crate) use request::{ApplyRequest, HitCountsRequest, MatchRequest, PrefixRequest};

use crate::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};

/// Room first made for a message. Most requests and answers but long prompts
/// fit, and a larger message announces its length before it comes.
pub(super) const BUFFER_BYTES: usize = 1024;

/// Codec of `ApplyExternalKvBatch`.
pub(crate) type ApplyCodec = WireCodec<ApplyRequest>;
/// Codec of `MatchExternalKv`.
pub(crate) type MatchCodec = WireCodec<MatchRequest>;
/// Codec of `MatchExternalKvPrefix`.
pub(crate) type PrefixCodec = WireCodec<PrefixRequest>;
/// Codec of `GetExternalKvHitCounts`.
pub(crate) type HitCountsCodec = WireCodec<HitCountsRequest>;

/// A request that reads itself from a whole message.
pub(crate) trait FromWire: Sized {
    /// Reads and checks the message in `bytes`, keeping slices of it.
    fn from_wire(bytes: Bytes) -> Result<Self, RequestError>;
}

/// An answer, already encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer(Vec<u8>);

/// Reads `T`, writes [`Answer`].
#[derive(Debug)]
pub(crate) struct WireCodec<T>(PhantomData<fn() -> T>);

impl<T> Default for WireCodec<T> {
    fn default() -> Self {
        WireCodec(PhantomData)
    }
}

impl<T: FromWire + Send + 'static> Codec for WireCodec<T> {
    type Encode = Answer;
    type Decode = T;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<T: FromWire> Decoder for WireCodec<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        // Splits the message off tonic's buffer; nothing is copied.
        let message = source.copy_to_bytes(source.remaining());
        Ok(Some(T::from_wire(message)?))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES)
    }
}

impl<T> Encoder for WireCodec<T> {
    type Item = Answer;
    type Error = Status;

    fn encode(&mut self, answer: Answer, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        target.reserve(answer.0.len());
        target.put_slice(&answer.0);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES)
    }
}

/// Why a request was refused before anything was looked up or changed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RequestError {
    /// The bytes are no protobuf message of this kind.
    Malformed(DecodeError),
    /// A length points past the end of the message.
    Truncated,
    /// A packed list of hashes is not a whole number of them.
    RaggedHashes {
        /// Length of the list in bytes.
        bytes: usize,
    },
    /// More than [`ACTIONS_PER_APPLY_MAX`].
    TooManyActions,
    /// More than [`HASHES_PER_CALL_MAX`] in the whole request.
    TooManyHashes,
    /// More component masks or block sizes than a request can have hashes.
    TooMuchMetadata {
        /// Name of the field.
        field: &'static str,
    },
    /// An apply without a worker.
    EmptyWorkerId,
    /// A query without hashes.
    NoHashes,
    /// An action at no tier that there is.
    UnknownTier {
        /// Place of the action in the batch.
        action: usize,
        /// The number found.
        tier: i32,
    },
    /// An action of no type that there is.
    UnknownType {
        /// Place of the action in the batch.
        action: usize,
        /// The number found.
        kind: i32,
    },
    /// A report or revoke without hashes.
    NoActionHashes {
        /// Place of the action in the batch.
        action: usize,
    },
    /// Metadata that is neither empty nor one value per hash.
    MetadataLength {
        /// Place of the action in the batch.
        action: usize,
        /// Name of the field.
        field: &'static str,
        /// Values in it.
        values: usize,
        /// Hashes of the action.
        hashes: usize,
    },
}

impl From<DecodeError> for RequestError {
    fn from(error: DecodeError) -> Self {
        RequestError::Malformed(error)
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::Malformed(error) => write!(f, "malformed request: {error}"),
            RequestError::Truncated => write!(f, "malformed request: a field ends past the message"),
            RequestError::RaggedHashes { bytes } => {
                write!(f, "malformed request: packed hashes of {bytes} bytes, not a multiple of 8")
            }
            RequestError::TooManyActions => write!(f, "more than {ACTIONS_PER_APPLY_MAX} actions in a batch"),
            RequestError::TooManyHashes => write!(f, "more than {HASHES_PER_CALL_MAX} hashes in a request"),
            RequestError::TooMuchMetadata { field } => {
                write!(f, "more than {HASHES_PER_CALL_MAX} {field} in a request")
            }
            RequestError::EmptyWorkerId => write!(f, "worker_id is empty"),
            RequestError::NoHashes => write!(f, "no hashes"),
            RequestError::UnknownTier { action, tier } => write!(f, "action {action}: unknown tier {tier}"),
            RequestError::UnknownType { action, kind } => write!(f, "action {action}: unknown type {kind}"),
            RequestError::NoActionHashes { action } => write!(f, "action {action}: no hashes"),
            RequestError::MetadataLength { action, field, values, hashes } => {
                write!(f, "action {action}: {values} {field} for {hashes} hashes")
            }
        }
    }
}

impl std::error::Error for RequestError {}
