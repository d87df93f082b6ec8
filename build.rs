//! Generates the messages, the client and the two views of the service.
//!
//! The `.proto` is compiled in pure Rust, so a build needs no `protoc`. The
//! client and its messages are prost's. The server's side is generated a second
//! time over the crate's own request and answer types, which keep hashes as
//! slices of the received bytes and enforce bounds while decoding. The compiled
//! descriptors are kept beside the code, for gRPC reflection.

use std::error::Error;
use std::path::PathBuf;

use tonic_build::manual;

const PROTO: &str = "proto/kv_indexer.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={PROTO}");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).open_files([PROTO])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    std::fs::write(out.join("kv_indexer.bin"), compiler.encode_file_descriptor_set())?;
    compiler.include_source_info(true);
    tonic_prost_build::configure().build_server(false).compile_fds(compiler.file_descriptor_set())?;

    let method = |name: &str, route: &str, request: &str, answer: &str, codec: &str| {
        manual::Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::server::wire::{request}"))
            .output_type(format!("crate::server::wire::{answer}"))
            .codec_path(format!("crate::server::wire::{codec}"))
            .build()
    };
    let service = manual::Service::builder()
        .name("KVIndexer")
        .package("kv_indexer.v1")
        .comment("The index as the server sees it: requests in place, answers already encoded.")
        .method(method("apply", "ApplyExternalKvBatch", "ApplyRequest", "Answer", "ApplyCodec"))
        .method(method("match_blocks", "MatchExternalKv", "MatchRequest", "Answer", "MatchCodec"))
        .method(method("match_prefix", "MatchExternalKvPrefix", "PrefixRequest", "Answer", "PrefixCodec"))
        .method(method(
            "hit_counts",
            "GetExternalKvHitCounts",
            "HitCountsRequest",
            "Answer",
            "HitCountsCodec",
        ))
        .build();
    manual::Builder::new().build_client(false).compile(&[service]);
    Ok(())
}
