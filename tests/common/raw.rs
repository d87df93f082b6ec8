//! A client that sends whatever bytes a test makes, and the few rules of protobuf to make them by.

use bytes::{Buf, BufMut, Bytes};
use prost::Message;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};

/// Calls `method` with these bytes as the message.
pub(crate) async fn call<Answer: Message + Default>(
    channel: &Channel,
    method: &str,
    message: Vec<u8>,
) -> Result<Answer, Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.expect("a connection");
    let path = format!("/kv_indexer.v1.KVIndexer/{method}").parse().expect("a path");
    let answer = client.unary(Request::new(Bytes::from(message)), path, Plain).await?;
    Ok(Answer::decode(answer.into_inner()).expect("an answer in protobuf"))
}

/// Messages are their bytes.
struct Plain;

impl Codec for Plain {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Plain;
    type Decoder = Plain;

    fn encoder(&mut self) -> Plain {
        Plain
    }

    fn decoder(&mut self) -> Plain {
        Plain
    }
}

impl Encoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for Plain {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Seven bits a byte, lowest first.
pub(crate) fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number > 0x7f {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn key(field: u64, wire_type: u64) -> Vec<u8> {
    varint(field << 3 | wire_type)
}

/// A field that is a number.
pub(crate) fn number(field: u64, value: u64) -> Vec<u8> {
    [key(field, 0), varint(value)].concat()
}

/// A field that is a string, a message or a packed list.
pub(crate) fn chunk(field: u64, bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [key(field, 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

/// Hashes in one packed chunk.
pub(crate) fn packed(field: u64, hashes: &[i64]) -> Vec<u8> {
    chunk(field, hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<u8>>())
}

/// Hashes one by one.
pub(crate) fn unpacked(field: u64, hashes: &[i64]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| [key(field, 1), hash.to_le_bytes().to_vec()].concat()).collect()
}

/// Small numbers in one packed chunk.
pub(crate) fn packed_numbers(field: u64, values: &[u64]) -> Vec<u8> {
    chunk(field, values.iter().flat_map(|value| varint(*value)).collect::<Vec<u8>>())
}

/// One field of each wire type, all with this number.
pub(crate) fn unknown(field: u64) -> Vec<u8> {
    let fixed32 = [key(field, 5), vec![1; 4]].concat();
    let fixed64 = [key(field, 1), vec![2; 8]].concat();
    let group = [key(field, 3), chunk(1, b"in a group"), number(3, 4), key(field, 4)].concat();
    [number(field, u64::MAX), chunk(field, b"unknown"), fixed32, fixed64, group].concat()
}
