//! Connections to a server, and its errors as exit codes.

use std::time::Duration;

use clap::Args;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::{ENDPOINT, Environment, Failure};
use crate::client::{self, ErrorClass, QueryError};
use crate::pb::kv_indexer_client::KvIndexerClient;

/// Largest answer that is read: one to a match of the most hashes that hundreds of workers hold.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;

/// The server, unless told.
const ENDPOINT_DEFAULT: &str = "http://[::1]:50051";

#[derive(Debug, Args)]
pub(super) struct ServerArguments {
    /// The server: http://HOST:PORT or unix:PATH. `query` takes several and asks the first that answers.
    /// [default: http://[::1]:50051] [env: KV_INDEXER_ENDPOINT]
    #[arg(long = "server", short, value_name = "URL")]
    servers: Vec<String>,
    /// Milliseconds that each call may take.
    #[arg(long, value_name = "MILLISECONDS", default_value = "5000",
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    timeout_ms: u64,
}

impl ServerArguments {
    /// The servers in order, at least one.
    pub(super) fn endpoints(&self, environment: &Environment<'_>) -> Result<Vec<String>, Failure> {
        if !self.servers.is_empty() {
            return Ok(self.servers.clone());
        }
        Ok(vec![endpoint_default(environment)?])
    }

    /// Time of a call.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// A client of the only server.
    pub(super) fn client(&self, environment: &Environment<'_>) -> Result<KvIndexerClient<Channel>, Failure> {
        let endpoints = self.endpoints(environment)?;
        let [endpoint] = endpoints.as_slice() else {
            return Err(Failure::Input("only query takes several servers".to_owned()));
        };
        let endpoint = client::endpoint(endpoint).map_err(|error| Failure::Input(error.to_string()))?;
        let channel = endpoint.timeout(self.timeout()).connect_lazy();
        Ok(KvIndexerClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX))
    }
}

/// The server where no flag names one.
pub(super) fn endpoint_default(environment: &Environment<'_>) -> Result<String, Failure> {
    match (environment.variable)(ENDPOINT).filter(|value| !value.is_empty()) {
        None => Ok(ENDPOINT_DEFAULT.to_owned()),
        Some(value) => {
            value.into_string().map_err(|value| Failure::Input(format!("{ENDPOINT}={value:?}: not UTF-8")))
        }
    }
}

/// A call's error: whether there was no answer, or one that says no.
pub(super) fn failed(status: &Status) -> Failure {
    let code = status.code();
    match ErrorClass::of(status) {
        // The contract's bounds are checked here before a call, so that exhausted means overloaded.
        ErrorClass::Unreachable | ErrorClass::Timeout | ErrorClass::Overloaded => {
            Failure::NoAnswer(format!("no answer: {}", describe(code, status)))
        }
        ErrorClass::TooLarge | ErrorClass::Rejected => {
            Failure::Refused(format!("refused: {}", describe(code, status)))
        }
    }
}

fn describe(code: Code, status: &Status) -> String {
    format!("{code:?}: {}", client::reason(status))
}

/// A prefix query's error, likewise.
pub(super) fn unanswered(error: &QueryError) -> Failure {
    match error.class {
        ErrorClass::Unreachable | ErrorClass::Timeout | ErrorClass::Overloaded => {
            Failure::NoAnswer(error.to_string())
        }
        ErrorClass::TooLarge | ErrorClass::Rejected => Failure::Refused(error.to_string()),
    }
}
