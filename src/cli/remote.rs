//! Connections to a server, and its errors as exit codes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::{ENDPOINT, Environment, Failure};
use crate::client::{self, Credentials, ErrorClass, QueryError};
use crate::pb::kv_indexer_client::KvIndexerClient;

/// Largest answer that is read: one to a match of the most hashes that hundreds of workers hold.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;

/// The server, unless told.
const ENDPOINT_DEFAULT: &str = "http://[::1]:50051";

/// Variables of the files below, as the bridge has them.
const CA_FILE: &str = "KV_INDEXER_CA_FILE";
const CLIENT_CERT_FILE: &str = "KV_INDEXER_CLIENT_CERT_FILE";
const CLIENT_KEY_FILE: &str = "KV_INDEXER_CLIENT_KEY_FILE";
const TOKEN_FILE: &str = "KV_INDEXER_TOKEN_FILE";

/// A client that shows its token.
pub(super) type Remote = KvIndexerClient<InterceptedService<Channel, Shown>>;

#[derive(Debug, Args)]
pub(super) struct ServerArguments {
    /// The server: http://HOST:PORT, https://HOST:PORT or unix:PATH. `query` takes several and asks the first
    /// that answers. [default: http://[::1]:50051] [env: KV_INDEXER_ENDPOINT, several with commas]
    #[arg(long = "server", short, value_name = "URL")]
    servers: Vec<String>,
    /// Milliseconds that each call may take.
    #[arg(long, value_name = "MILLISECONDS", default_value = "5000",
          value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    timeout_ms: u64,
    /// Authorities in PEM to know an https server by. [env: KV_INDEXER_CA_FILE]
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Certificate in PEM to show, for a server that asks for one. [env: KV_INDEXER_CLIENT_CERT_FILE]
    #[arg(long, value_name = "FILE")]
    client_cert_file: Option<PathBuf>,
    /// The private key of that certificate. [env: KV_INDEXER_CLIENT_KEY_FILE]
    #[arg(long, value_name = "FILE")]
    client_key_file: Option<PathBuf>,
    /// File whose first line is the token that allows the call. [env: KV_INDEXER_TOKEN_FILE]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl ServerArguments {
    /// The servers in order, at least one.
    pub(super) fn endpoints(&self, environment: &Environment<'_>) -> Result<Vec<String>, Failure> {
        if self.servers.is_empty() { endpoints_default(environment) } else { Ok(self.servers.clone()) }
    }

    /// Time of a call.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// What servers are known by and shown, from files.
    pub(super) fn credentials(&self, environment: &Environment<'_>) -> Result<Credentials, Failure> {
        let file = |flag: &Option<PathBuf>, name| {
            let path = flag.clone().or_else(|| told(environment, name).map(PathBuf::from));
            path.map(|path| read(&path)).transpose()
        };
        let certificate = file(&self.client_cert_file, CLIENT_CERT_FILE)?;
        let identity_pem = match (certificate, file(&self.client_key_file, CLIENT_KEY_FILE)?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(Failure::Input("a certificate needs its key, and a key its certificate".into())),
        };
        let token = file(&self.token_file, TOKEN_FILE)?;
        let token = token.map(|text| text.lines().next().unwrap_or_default().trim().to_owned());
        Ok(Credentials { authorities_pem: file(&self.ca_file, CA_FILE)?, identity_pem, token })
    }

    /// A client of one server: the flag's only one, or the variable's first.
    pub(super) fn client(&self, environment: &Environment<'_>) -> Result<Remote, Failure> {
        if self.servers.len() > 1 {
            return Err(Failure::Input("only query takes several servers".to_owned()));
        }
        let credentials = self.credentials(environment)?;
        let unusable = |error: client::ConfigError| Failure::Input(error.to_string());
        let endpoint = &self.endpoints(environment)?[0];
        let endpoint = client::endpoint(endpoint, &credentials).map_err(unusable)?;
        let channel = endpoint.timeout(self.timeout()).connect_lazy();
        let shown = Shown(credentials.bearer().map_err(unusable)?);
        let client = KvIndexerClient::with_interceptor(channel, shown);
        Ok(client.max_decoding_message_size(ANSWER_BYTES_MAX))
    }
}

/// Puts the token into a call's headers.
#[derive(Debug, Clone)]
pub(super) struct Shown(Option<MetadataValue<Ascii>>);

impl Interceptor for Shown {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request.metadata_mut().insert(client::AUTHORIZATION, bearer.clone());
        }
        Ok(request)
    }
}

fn read(path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| Failure::Input(format!("{}: {error}", path.display())))
}

/// A variable's value; an empty one counts as absent, as shells and manifests use it so.
fn told(environment: &Environment<'_>, name: &str) -> Option<std::ffi::OsString> {
    (environment.variable)(name).filter(|value| !value.is_empty())
}

/// The servers where no flag names one, at least one.
pub(super) fn endpoints_default(environment: &Environment<'_>) -> Result<Vec<String>, Failure> {
    let Some(value) = told(environment, ENDPOINT) else { return Ok(vec![ENDPOINT_DEFAULT.to_owned()]) };
    let value =
        value.into_string().map_err(|value| Failure::Input(format!("{ENDPOINT}={value:?}: not UTF-8")))?;
    Ok(value.split(',').map(|endpoint| endpoint.trim().to_owned()).collect())
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
