//! What the integration tests share: recorded streams, a publisher, a server.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

pub mod capture;
pub mod publisher;
pub mod server;
