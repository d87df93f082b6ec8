//! What tools ask: `grpc.reflection`, so that grpcurl works without a proto file.
//!
//! It knows the services that are served, from descriptors that the build
//! compiles; `v1alpha` is the same under its old name, which older tools ask for.

use std::io;

use tonic_reflection::server::Builder;

use super::memory::OTHER_BYTES_MAX;
use super::received::Received;
use super::routes::Other;

/// `proto/`, compiled.
const DESCRIPTORS: &[u8] = tonic::include_file_descriptor_set!("kv_indexer");

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// `grpc.reflection.v1.ServerReflection`.
///
/// # Errors
/// The descriptors of this build cannot be read.
pub(super) fn v1() -> io::Result<Other<Received>> {
    builder()
        .build_v1()
        .map(|service| Other::new(service.max_decoding_message_size(OTHER_BYTES_MAX)))
        .map_err(io::Error::other)
}

/// `grpc.reflection.v1alpha.ServerReflection`.
///
/// # Errors
/// The descriptors of this build cannot be read.
pub(super) fn v1alpha() -> io::Result<Other<Received>> {
    builder()
        .build_v1alpha()
        .map(|service| Other::new(service.max_decoding_message_size(OTHER_BYTES_MAX)))
        .map_err(io::Error::other)
}
