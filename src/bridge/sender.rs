//! The gRPC client: one RPC after the other, each until the server has taken it.
//!
//! A batch that is applied twice leaves the same state, so an attempt whose
//! outcome is unknown is simply made again; what must not happen is that a later
//! batch overtakes it, hence one at a time. It knows no events and no engine.
//!
//! Cost: one copy of the batch per attempt.

use std::fmt;
use std::time::Duration;

use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::transport::Endpoint;
use tonic::{Code, Extensions, Request, Status};
use tracing::{info, warn};

use super::backoff::Backoff;
use super::config::Config;
use super::credentials::{Connection, CredentialsError};
use super::dial::Dialler;
use super::health::is_loud;
use super::replica::Told;
use super::status::Reporter;
use crate::pb::{ApplyExternalKvBatchRequest, WorkerCacheSpec};

/// Longest that one attempt may take: applies are never shed and take
/// milliseconds, so a longer silence is a lost server.
const ATTEMPT_MAX: Duration = Duration::from_secs(10);

/// Longest that connecting may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// How often a quiet connection is tried, and how long an answer may take.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Response metadata, `new` if the server did not know the worker before the batch.
const WORKER_KEY: &str = "kv-indexer-worker";

/// Request metadata that says whether the server knows everything once it has taken the batch.
const STREAM_KEY: &str = "kv-indexer-stream";
const SYNCHRONISED: &str = "synchronised";
const SYNCHRONISING: &str = "synchronising";

/// Response metadata with which a server names the instance that it is; in a request, the
/// instance that is thought to be told.
const INSTANCE_KEY: &str = "kv-indexer-instance";

/// The server's address cannot be used.
#[derive(Debug)]
pub enum ServerError {
    /// The URL is not one.
    Url(tonic::transport::Error),
    /// A file of certificates, a key or a token cannot be used.
    Credentials(CredentialsError),
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerError::Url(error) => write!(f, "the server's URL cannot be used: {error}"),
            ServerError::Credentials(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ServerError {}

/// The server understood a batch and will never take it: the two disagree about
/// the contract, and sending it again cannot help.
#[derive(Debug)]
pub struct Refused {
    /// The server's answer.
    pub status: Status,
    /// The batch's number.
    pub sequence: u64,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { status, sequence } = self;
        write!(f, "the server refused batch {sequence} for good: {:?}: {}", status.code(), status.message())
    }
}

impl std::error::Error for Refused {}

/// What tells one life of a server from another.
///
/// A server that names its instance says so itself; of any other a new connection may
/// be to a process that knows nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Life {
    /// The instance that the server named.
    Instance(Box<[u8]>),
    /// The number of the connection.
    Connection(u64),
}

/// What the answer to a batch tells of the server.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) life: Life,
    /// Whether it did not know the worker before: it was removed, or never there.
    pub(super) is_new: bool,
}

/// Sends batches of one worker to one server.
pub(super) struct Sender {
    connection: Connection,
    worker_id: String,
    worker_address: String,
    cache_spec: Option<WorkerCacheSpec>,
    sent: u64,
    /// Place of the server in the stream's status.
    place: usize,
    reporter: Reporter,
}

impl Sender {
    /// A sender to the server at `place` of the configured ones; connects when it first sends.
    pub(super) fn new(config: &Config, place: usize, reporter: Reporter) -> Result<Self, ServerError> {
        let server = &config.servers[place];
        let endpoint = Endpoint::from_shared(server.clone())
            .map_err(ServerError::Url)?
            .timeout(ATTEMPT_MAX)
            .connect_timeout(CONNECT_MAX)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let connection = Connection::new(endpoint, Dialler::new(server), config.credentials.clone())
            .map_err(ServerError::Credentials)?;
        Ok(Sender {
            connection,
            worker_id: config.worker_id.clone(),
            worker_address: config.worker_address.clone(),
            cache_spec: config.cache_spec,
            sent: 0,
            place,
            reporter,
        })
    }

    /// Sends one batch, for as long as it takes; gives what its answer tells.
    ///
    /// `life` is the one that took the last batch; a server that says which instance it is
    /// can tell from it whether the batch is meant for it.
    pub(super) fn send(
        &mut self,
        told: Told,
        life: Option<&Life>,
    ) -> impl Future<Output = Result<Taken, Refused>> + Send + use<> {
        self.sent += 1;
        let request = ApplyExternalKvBatchRequest {
            worker_id: self.worker_id.clone(),
            seq: self.sent,
            actions: told.actions,
            worker_address: self.worker_address.clone(),
            cache_spec: self.cache_spec,
        };
        let mut metadata = MetadataMap::new();
        let state = if told.synchronised { SYNCHRONISED } else { SYNCHRONISING };
        metadata.insert(STREAM_KEY, MetadataValue::from_static(state));
        if let Some(Life::Instance(instance)) = life
            && let Ok(instance) = MetadataValue::try_from(&instance[..])
        {
            metadata.insert(INSTANCE_KEY, instance);
        }
        send(self.connection.clone(), request, metadata, self.place, self.reporter.clone())
    }
}

async fn send(
    connection: Connection,
    batch: ApplyExternalKvBatchRequest,
    metadata: MetadataMap,
    place: usize,
    reporter: Reporter,
) -> Result<Taken, Refused> {
    let mut backoff = Backoff::default();
    let mut failures = 0_u64;
    let sequence = batch.seq;
    let response = loop {
        let request = Request::from_parts(metadata.clone(), Extensions::default(), batch.clone());
        let status = match connection.client().apply_external_kv_batch(request).await {
            Ok(response) => break response,
            Err(status) => status,
        };
        if !is_passing(status.code()) {
            return Err(Refused { status, sequence });
        }
        failures += 1;
        reporter.update(|status| status.servers[place].failures = failures);
        if is_loud(failures, 1) {
            let (code, message) = (status.code(), status.message());
            warn!(sequence, failures, ?code, "the server did not take a batch, trying again: {message}");
        }
        tokio::time::sleep(backoff.wait()).await;
        if let Err(error) = connection.renew()
            && is_loud(failures, 1)
        {
            warn!("credentials cannot be read again, the old ones are used: {error}");
        }
    };
    reporter.update(|status| {
        let server = &mut status.servers[place];
        server.sent_rpcs = sequence;
        server.failures = 0;
    });
    if failures > 0 {
        info!(sequence, failures, "the server takes batches again");
    }
    let metadata = response.metadata();
    let life = match metadata.get(INSTANCE_KEY) {
        Some(instance) => Life::Instance(instance.as_bytes().into()),
        None => Life::Connection(connection.number()),
    };
    let is_new = metadata.get(WORKER_KEY).is_some_and(|worker| worker.as_bytes() == b"new");
    Ok(Taken { life, is_new })
}

/// Whether the same batch may be taken later.
fn is_passing(code: Code) -> bool {
    match code {
        Code::Ok => true,
        // Unreachable, slow, or overloaded. A batch keeps the contract's bounds, so exhausted means overload.
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted => true,
        // What a connection that breaks in the middle of a call, a proxy or a crash is reported as: these say
        // nothing about the batch.
        Code::Unknown | Code::Internal | Code::Aborted => true,
        // The wrong token or certificate: somebody will mend that here or there, and files are read again.
        Code::Unauthenticated | Code::PermissionDenied => true,
        Code::InvalidArgument
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::FailedPrecondition
        | Code::NotFound
        | Code::AlreadyExists
        | Code::DataLoss => false,
    }
}
