//! How a bridge knows its server, and how it shows who it is.
//!
//! All of it is in files: authorities of the server's certificate, a certificate of
//! the bridge's own, a token. They are read at the start, so that a bad one stops
//! it, and again whenever the server does not take a report, so that renewed ones
//! are used without a restart. What they hold never reaches a log or an error.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use super::dial::Dialler;
use crate::pb::kv_indexer_client::KvIndexerClient;
use crate::settings::{Setting, SettingError, Settings};

pub(super) const CA_FILE: Setting = Setting {
    name: "KV_INDEXER_CA_FILE",
    value: "FILE",
    default: None,
    help: "Authorities in PEM, one of which must have signed the server's certificate. Required with an https \
           server.",
};

pub(super) const CLIENT_CERT_FILE: Setting = Setting {
    name: "KV_INDEXER_CLIENT_CERT_FILE",
    value: "FILE",
    default: None,
    help: "The bridge's own certificate and chain in PEM, for a server that asks for one.",
};

pub(super) const CLIENT_KEY_FILE: Setting = Setting {
    name: "KV_INDEXER_CLIENT_KEY_FILE",
    value: "FILE",
    default: None,
    help: "The private key of that certificate, in PEM. Required with it.",
};

pub(super) const TOKEN_FILE: Setting = Setting {
    name: "KV_INDEXER_TOKEN_FILE",
    value: "FILE",
    default: None,
    help: "The token that allows applies, in the first line.",
};

/// Files to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Authorities of the server's certificate.
    pub ca: Option<PathBuf>,
    /// Certificate and key of the bridge.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The token.
    pub token: Option<PathBuf>,
}

impl Credentials {
    /// Reads the settings for these servers; the files are read when a connection is made.
    pub(super) fn from_settings(settings: &Settings, servers: &[String]) -> Result<Self, SettingError> {
        let path = |setting: &Setting| settings.get(setting).map(PathBuf::from);
        let is_tls = servers.iter().any(|server| server.starts_with("https://"));
        let (ca, token) = (path(&CA_FILE), path(&TOKEN_FILE));
        let missing = |setting: &Setting, why: &str| SettingError {
            name: setting.name,
            value: None,
            takes: format!("a PEM file, as {why}"),
        };
        if is_tls && ca.is_none() {
            return Err(missing(&CA_FILE, "a server is https"));
        }
        let identity = match (path(&CLIENT_CERT_FILE), path(&CLIENT_KEY_FILE)) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (Some(_), None) => return Err(missing(&CLIENT_KEY_FILE, "the certificate is set")),
            (None, Some(_)) => return Err(missing(&CLIENT_CERT_FILE, "its key is set")),
            (None, None) => None,
        };
        for setting in [CA_FILE, CLIENT_CERT_FILE] {
            if let Some(value) = settings.get(&setting).filter(|_| !is_tls) {
                let takes = format!("a file only with an https server, not with {}", servers.join(","));
                return Err(SettingError { name: setting.name, value: Some(value.to_owned()), takes });
            }
        }
        Ok(Credentials { ca, identity, token })
    }

    fn is_none(&self) -> bool {
        *self == Credentials::default()
    }

    /// Puts what the files hold into a connection that is made when it is first used.
    fn apply(&self, endpoint: Endpoint, dialler: &Dialler) -> Result<Client, CredentialsError> {
        let is_tls = endpoint.uri().scheme_str() == Some("https");
        let endpoint = match self.ca.as_ref().filter(|_| is_tls) {
            None if is_tls => {
                let why = "the server is https, and no file of authorities is given".to_owned();
                return Err(CredentialsError { path: PathBuf::new(), why });
            }
            None => endpoint,
            Some(ca) => {
                let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(ca)?));
                if let Some((cert, key)) = &self.identity {
                    tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
                }
                let unusable =
                    |_| CredentialsError { path: ca.clone(), why: "certificates or key unusable".into() };
                endpoint.tls_config(tls).map_err(unusable)?
            }
        };
        let token = self.token.as_deref().map(token).transpose()?;
        Ok(KvIndexerClient::with_interceptor(dialler.channel(&endpoint), Shown { token }))
    }
}

/// A file that cannot be used.
#[derive(Debug)]
pub struct CredentialsError {
    path: PathBuf,
    why: String,
}

impl fmt::Display for CredentialsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_os_str().is_empty() {
            true => f.write_str(&self.why),
            false => write!(f, "{}: {}", self.path.display(), self.why),
        }
    }
}

impl std::error::Error for CredentialsError {}

fn read(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    std::fs::read(path).map_err(|error| CredentialsError { path: path.to_owned(), why: error.to_string() })
}

/// The first line of a file as the value that is sent.
fn token(path: &Path) -> Result<MetadataValue<Ascii>, CredentialsError> {
    let wrong = || CredentialsError { path: path.to_owned(), why: "no token in its first line".to_owned() };
    let text = String::from_utf8(read(path)?).map_err(|_| wrong())?;
    let token = text.lines().next().map(str::trim).filter(|token| !token.is_empty()).ok_or_else(wrong)?;
    let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| wrong())?;
    // Kept out of HTTP/2's tables and of any log of headers.
    value.set_sensitive(true);
    Ok(value)
}

/// Shows the token with every call.
#[derive(Clone)]
pub(super) struct Shown {
    token: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Shown {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// The client of one server.
pub(super) type Client = KvIndexerClient<InterceptedService<Channel, Shown>>;

/// A connection that can be made anew with renewed files.
#[derive(Clone)]
pub(super) struct Connection {
    endpoint: Endpoint,
    dialler: Dialler,
    credentials: Credentials,
    client: Arc<Mutex<Client>>,
}

impl Connection {
    /// One that is made when it is first used.
    pub(super) fn new(
        endpoint: Endpoint,
        dialler: Dialler,
        credentials: Credentials,
    ) -> Result<Self, CredentialsError> {
        let client = Arc::new(Mutex::new(credentials.apply(endpoint.clone(), &dialler)?));
        Ok(Connection { endpoint, dialler, credentials, client })
    }

    /// How many connections to the server were begun.
    pub(super) fn number(&self) -> u64 {
        self.dialler.number()
    }

    /// The client to use now.
    pub(super) fn client(&self) -> Client {
        self.lock().clone()
    }

    /// Reads the files again for the next call. Without files a connection mends itself.
    pub(super) fn renew(&self) -> Result<(), CredentialsError> {
        if !self.credentials.is_none() {
            let renewed = self.credentials.apply(self.endpoint.clone(), &self.dialler)?;
            *self.lock() = renewed;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Client> {
        // A client is swapped whole, so it is good whatever panicked.
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(server: &str, pairs: &[(&'static str, &'static str)]) -> Result<Credentials, SettingError> {
        Credentials::from_settings(&Settings::from_pairs(pairs.iter().copied()), &[server.to_owned()])
    }

    #[test]
    fn settings_that_belong_together_are_asked_for() {
        assert_eq!(read("http://h:1", &[]), Ok(Credentials::default()));
        /// A server, settings, and the name of the setting that is wrong.
        type Row = (&'static str, &'static [(&'static str, &'static str)], &'static str);
        let rows: &[Row] = &[
            ("https://h:1", &[], "KV_INDEXER_CA_FILE"),
            ("http://h:1", &[("KV_INDEXER_CA_FILE", "ca")], "KV_INDEXER_CA_FILE"),
            (
                "https://h:1",
                &[("KV_INDEXER_CA_FILE", "ca"), ("KV_INDEXER_CLIENT_CERT_FILE", "c")],
                "KV_INDEXER_CLIENT_KEY_FILE",
            ),
            (
                "https://h:1",
                &[("KV_INDEXER_CA_FILE", "ca"), ("KV_INDEXER_CLIENT_KEY_FILE", "k")],
                "KV_INDEXER_CLIENT_CERT_FILE",
            ),
        ];
        for (server, pairs, name) in rows {
            assert_eq!(read(server, pairs).expect_err(server).name, *name, "{pairs:?}");
        }
    }
}
