//! Every bound of the contract, each with its home here and its reason.

use std::time::Duration;

/// Most actions of one apply. More are refused while decoding, so that a flood
/// of empty actions costs nothing.
pub const ACTIONS_PER_APPLY_MAX: usize = 256;

/// Most hashes over all actions of one apply, and of one match or hit-count
/// request: it bounds how long one call may hold the index's lock.
pub const HASHES_PER_CALL_MAX: usize = 16_384;

/// Largest decoded gRPC message, in bytes: a prompt of a million blocks.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Concurrent HTTP/2 streams of one connection.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 64;

/// Prefix queries executing at once, unless configured.
pub const PREFIX_QUERIES_IN_FLIGHT_DEFAULT: usize = 32;

/// First and longest wait between two attempts to reach a peer again.
pub const RECONNECT_BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
