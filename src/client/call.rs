//! One attempt at one endpoint.
//!
//! The request is sent as it was encoded and the answer's bytes are split off the
//! connection's buffer; nothing between them is decoded by anybody else. The time
//! limit covers all of it, from waiting for a connection to the last byte.

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::config::{self, Config, ConfigError};
use super::{Answer, ErrorClass, Prompt, QueryError};
use crate::limits::MESSAGE_BYTES_MAX;

/// The RPC's path.
const PATH: &str = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix";

/// The header of a token.
pub(crate) const AUTHORIZATION: &str = "authorization";

/// Room first made for a message: most fit, and a larger one says its length before it comes.
const BUFFER_BYTES: usize = 1024;

/// One endpoint.
#[derive(Debug)]
pub(super) struct Server {
    name: Arc<str>,
    endpoint: Endpoint,
    /// Made by the first query, inside of its runtime. Connects by itself when it is used.
    channel: OnceLock<Channel>,
    bearer: Option<MetadataValue<Ascii>>,
    answer_bytes_max: usize,
}

impl Server {
    pub(super) fn new(name: &str, config: &Config) -> Result<Self, ConfigError> {
        Ok(Server {
            name: name.into(),
            endpoint: config::parse(name, &config.credentials)?,
            channel: OnceLock::new(),
            bearer: config.credentials.bearer()?,
            answer_bytes_max: config.answer_bytes_max,
        })
    }

    /// The endpoint as it was configured.
    pub(super) fn endpoint(&self) -> &str {
        &self.name
    }

    /// Asks once, for at most `limit`.
    pub(super) async fn ask(&self, prompt: &Prompt, limit: Duration) -> Result<Answer, QueryError> {
        let error = |class, reason| QueryError { class, endpoint: Some(Arc::clone(&self.name)), reason };
        let bytes = match tokio::time::timeout(limit, self.call(prompt.message(), limit)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(status)) => return Err(error(ErrorClass::of(&status), reason(&status))),
            Err(_) => return Err(error(ErrorClass::Timeout, format!("no answer within {limit:.0?}"))),
        };
        Answer::from_wire(bytes, prompt)
            .map_err(|malformed| error(ErrorClass::Rejected, malformed.to_string()))
    }

    async fn call(&self, message: Bytes, limit: Duration) -> Result<Bytes, Status> {
        let channel = self.channel.get_or_init(|| self.endpoint.connect_lazy()).clone();
        let mut grpc = Grpc::new(channel)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
            .max_decoding_message_size(self.answer_bytes_max);
        grpc.ready()
            .await
            .map_err(|error| Status::unavailable(with_causes(error.to_string(), error.source())))?;
        let mut request = Request::new(message);
        request.set_timeout(limit);
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert(AUTHORIZATION, bearer.clone());
        }
        let answer = grpc.unary(request, PathAndQuery::from_static(PATH), Raw).await?;
        Ok(answer.into_inner())
    }
}

/// What a status says, with the causes that its connection gave.
pub(crate) fn reason(status: &Status) -> String {
    let text = match status.message() {
        "" => status.code().description(),
        message => message,
    };
    with_causes(text.to_owned(), status.source())
}

/// A text with the causes behind it, each told once.
fn with_causes(mut text: String, mut cause: Option<&dyn Error>) -> String {
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Messages are their bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        target.reserve(message.len());
        target.put(message);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES)
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        // Splits the message off tonic's buffer; nothing is copied.
        Ok(Some(source.copy_to_bytes(source.remaining())))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES)
    }
}
