//! Generates the messages, the client and the two views of the service.
//!
//! The `.proto` is compiled in pure Rust, so a build needs no `protoc`. The
//! client and its messages are prost's. The server's side is generated a second
//! time over the crate's own request and answer types, which keep hashes as
//! slices of the received bytes and enforce bounds while decoding. The admin service
//! is generated as usual, over prost's messages. The compiled
//! descriptors are kept beside the code, for gRPC reflection.
//!
//! A release build also learns its commit: from `KV_INDEXER_COMMIT` if that is set,
//! else from git if there is a repository, as there is none in a tarball or an image.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

use tonic_build::manual;

const PROTO: &str = "proto/kv_indexer.proto";
const ADMIN_PROTO: &str = "proto/kv_indexer_admin.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={PROTO}");
    println!("cargo::rerun-if-changed={ADMIN_PROTO}");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=KV_INDEXER_COMMIT={}", commit());
    let compiler = |files: &[&str]| -> Result<protox::Compiler, protox::Error> {
        let mut compiler = protox::Compiler::new(["proto"])?;
        compiler.include_imports(true).open_files(files)?;
        Ok(compiler)
    };
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    let all = compiler(&[PROTO, ADMIN_PROTO])?;
    std::fs::write(out.join("kv_indexer.bin"), all.encode_file_descriptor_set())?;
    let index = compiler(&[PROTO])?.include_source_info(true).file_descriptor_set();
    tonic_prost_build::configure().build_server(false).compile_fds(index)?;
    // In a folder of its own, as the imported file is generated along with it.
    let admin = compiler(&[ADMIN_PROTO])?.include_source_info(true).file_descriptor_set();
    let admin_out = out.join("admin");
    std::fs::create_dir_all(&admin_out)?;
    tonic_prost_build::configure()
        .extern_path(".kv_indexer.v1", "crate::pb")
        .out_dir(admin_out)
        .compile_fds(admin)?;

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

/// The commit this is built from, in a word.
fn commit() -> String {
    println!("cargo::rerun-if-env-changed=KV_INDEXER_COMMIT");
    let given = std::env::var("KV_INDEXER_COMMIT").ok();
    if let Some(given) =
        given.filter(|given| !given.is_empty() && given.chars().all(|c| c.is_ascii_graphic()))
    {
        return given;
    }
    // A debug build is not shipped, and naming its commit would build it anew after each.
    if std::env::var("PROFILE").as_deref() != Ok("release") {
        return "debug".to_owned();
    }
    // The log of HEAD changes with whatever HEAD names.
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

/// What git prints, if it is there and this is a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    Some(text).filter(|text| !text.is_empty())
}
