//! What the integration tests share: recorded streams, a publisher, a server.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::time::Duration;

pub mod binaries;
pub mod bridge;
pub mod capture;
pub mod peer;
pub mod publisher;
pub mod server;

/// Tries at a condition that must come, and the pause after each: far more than any machine needs.
pub const TRIES: u32 = 3_000;
pub const PAUSE: Duration = Duration::from_millis(20);
