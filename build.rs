//! Generates the messages, the client and the two views of the service.
//!
//! The `.proto` is compiled in pure Rust, so a build needs no `protoc`. The
//! client and its messages are prost's. The server's side is generated a second
//! time over the crate's own request and answer types, which keep hashes as
//! slices of the received bytes and enforce bounds while decoding.

use std::error::Error;

const PROTO: &str = "proto/kv_indexer.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={PROTO}");
    let descriptors = protox::compile([PROTO], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;

    Ok(())
}
