//! The gRPC client: one RPC after the other, each until the server has taken it.
//!
//! A batch that is applied twice leaves the same state, so an attempt whose
//! outcome is unknown is simply made again; what must not happen is that a later
//! batch overtakes it, hence one at a time. It knows no events and no engine.
//!
//! Cost: one copy of the batch per attempt.

use std::fmt;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{info, warn};

use super::backoff::Backoff;
use super::config::Config;
use super::health::is_loud;
use super::status::Reporter;
use crate::pb::kv_indexer_client::KvIndexerClient;
use crate::pb::{ApplyExternalKvBatchRequest, ExternalKvAction, WorkerCacheSpec};

/// Longest that one attempt may take: applies are never shed and take
/// milliseconds, so a longer silence is a lost server.
const ATTEMPT_MAX: Duration = Duration::from_secs(10);

/// Longest that connecting may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// How often a quiet connection is tried, and how long an answer may take.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The server's address cannot be used.
#[derive(Debug)]
pub enum ServerError {
    /// The URL is not one.
    Url(tonic::transport::Error),
    /// The URL asks for TLS, which this build has not.
    Tls,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerError::Url(error) => write!(f, "the server's URL cannot be used: {error}"),
            ServerError::Tls => f.write_str("the server's URL is https://, but this build has no TLS"),
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

/// Sends batches of one worker.
pub(super) struct Sender {
    client: KvIndexerClient<Channel>,
    worker_id: String,
    worker_address: String,
    cache_spec: Option<WorkerCacheSpec>,
    sent: u64,
    reporter: Reporter,
}

impl Sender {
    pub(super) fn new(config: &Config, reporter: Reporter) -> Result<Self, ServerError> {
        if config.server.starts_with("https://") {
            return Err(ServerError::Tls);
        }
        let channel = Endpoint::from_shared(config.server.clone())
            .map_err(ServerError::Url)?
            .timeout(ATTEMPT_MAX)
            .connect_timeout(CONNECT_MAX)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true)
            .connect_lazy();
        Ok(Sender {
            client: KvIndexerClient::new(channel),
            worker_id: config.worker_id.clone(),
            worker_address: config.worker_address.clone(),
            cache_spec: config.cache_spec,
            sent: 0,
            reporter,
        })
    }

    /// Sends one batch, for as long as it takes.
    pub(super) fn send(
        &mut self,
        actions: Vec<ExternalKvAction>,
    ) -> impl Future<Output = Result<(), Refused>> + Send + use<> {
        self.sent += 1;
        let request = ApplyExternalKvBatchRequest {
            worker_id: self.worker_id.clone(),
            seq: self.sent,
            actions,
            worker_address: self.worker_address.clone(),
            cache_spec: self.cache_spec,
        };
        send(self.client.clone(), request, self.reporter.clone())
    }
}

async fn send(
    mut client: KvIndexerClient<Channel>,
    request: ApplyExternalKvBatchRequest,
    reporter: Reporter,
) -> Result<(), Refused> {
    let mut backoff = Backoff::default();
    let mut failures = 0_u64;
    loop {
        let status = match client.apply_external_kv_batch(request.clone()).await {
            Ok(_) => break,
            Err(status) => status,
        };
        if !is_passing(status.code()) {
            return Err(Refused { status, sequence: request.seq });
        }
        failures += 1;
        reporter.update(|status| status.server_failures = failures);
        if is_loud(failures, 1) {
            let (code, message) = (status.code(), status.message());
            warn!(
                sequence = request.seq,
                failures,
                ?code,
                "the server did not take a batch, trying again: {message}"
            );
        }
        tokio::time::sleep(backoff.wait()).await;
    }
    reporter.update(|status| {
        status.sent_rpcs = request.seq;
        status.server_failures = 0;
    });
    if failures > 0 {
        info!(sequence = request.seq, failures, "the server takes batches again");
    }
    Ok(())
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
        Code::InvalidArgument
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::FailedPrecondition
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::DataLoss => false,
    }
}
