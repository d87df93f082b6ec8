//! TLS of the gRPC port, and certificates asked of clients.
//!
//! rustls with ring, TLS 1.2 and 1.3, HTTP/2 alone. With a file of authorities every
//! client must show a certificate of one of them; its names, DNS and URI, go to
//! `access`. Certificates are renewed for new connections; open ones keep theirs.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::kept::{Kept, Unusable};
use super::unusable;
use crate::settings::{Setting, SettingError, Settings};

pub(super) const CERT_FILE: Setting = Setting {
    name: "KV_INDEXER_TLS_CERT_FILE",
    value: "FILE",
    default: None,
    help: "The server's certificate and its chain, in PEM; with it gRPC is served over TLS alone. Read again when \
           it changes.",
};

pub(super) const KEY_FILE: Setting = Setting {
    name: "KV_INDEXER_TLS_KEY_FILE",
    value: "FILE",
    default: None,
    help: "The private key of that certificate, in PEM. Required with it.",
};

pub(super) const CLIENT_CA_FILE: Setting = Setting {
    name: "KV_INDEXER_TLS_CLIENT_CA_FILE",
    value: "FILE",
    default: None,
    help: "Authorities in PEM, one of which must have signed a client's certificate; without it clients need none.",
};

/// Places of the files in the list that is read.
const CERT: usize = 0;
const KEY: usize = 1;
const CLIENT_CA: usize = 2;

/// Accepts connections over TLS.
#[derive(Debug)]
pub(in crate::server) struct Acceptor {
    config: Kept<Arc<ServerConfig>>,
}

impl Acceptor {
    /// `None` without a certificate.
    pub(super) fn from_settings(settings: &Settings) -> Result<Option<Self>, SettingError> {
        let path = |setting: &Setting| settings.get(setting).map(PathBuf::from);
        let Some(cert) = path(&CERT_FILE) else {
            return match [KEY_FILE, CLIENT_CA_FILE].iter().find(|setting| settings.get(setting).is_some()) {
                Some(orphan) => Err(SettingError {
                    name: CERT_FILE.name,
                    value: None,
                    takes: format!("a PEM file, as {} is set", orphan.name),
                }),
                None => Ok(None),
            };
        };
        let key =
            settings.parse(&KEY_FILE, "a PEM file, as the certificate is set", |text| Some(text.into()))?;
        let mut paths: Vec<PathBuf> = vec![cert, key];
        paths.extend(path(&CLIENT_CA_FILE));
        let files = paths.clone();
        let config = Kept::read(paths, |contents| config(contents).map(Arc::new)).map_err(|error| {
            let setting = [CERT_FILE, KEY_FILE, CLIENT_CA_FILE][error.file];
            unusable(&setting, &files[error.file], error.why)
        })?;
        Ok(Some(Acceptor { config }))
    }

    /// Whether clients must show a certificate.
    pub(super) fn asks_clients(&self) -> bool {
        self.config.paths().len() > CLIENT_CA
    }

    pub(super) fn look_again(&self) {
        self.config.look_and_tell("TLS certificates");
    }

    /// Does the handshake of a connection.
    pub(in crate::server) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config.with(Arc::clone)).accept(stream).await
    }
}

/// Names in the certificate that a client has shown: each DNS name and URI.
pub(super) fn client_names(stream: &TlsStream<TcpStream>) -> Vec<String> {
    let (_, connection) = stream.get_ref();
    let certificate = connection.peer_certificates().and_then(<[_]>::first);
    // The handshake has checked it, so it can be read.
    let Some(certificate) = certificate.and_then(|der| webpki::EndEntityCert::try_from(der).ok()) else {
        return Vec::new();
    };
    let names = certificate.valid_dns_names().chain(certificate.valid_uri_names());
    names.map(str::to_owned).collect()
}

fn config(contents: &[Vec<u8>]) -> Result<ServerConfig, Unusable> {
    let wrong = |file| move |why: String| Unusable { file, why };
    let chain = certificates(&contents[CERT]).map_err(wrong(CERT))?;
    let key = PrivateKeyDer::from_pem_slice(&contents[KEY]);
    // Its error may show what it met, so it is not told.
    let key = key.map_err(|_| wrong(KEY)("no private key in PEM".to_owned()))?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder =
        builder.with_safe_default_protocol_versions().map_err(|error| wrong(CERT)(error.to_string()))?;
    let builder = match contents.get(CLIENT_CA) {
        None => builder.with_no_client_auth(),
        Some(authorities) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates(authorities).map_err(wrong(CLIENT_CA))? {
                roots.add(authority).map_err(|error| wrong(CLIENT_CA)(error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| wrong(CLIENT_CA)(error.to_string()))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| wrong(KEY)(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    match all {
        Ok(all) if all.is_empty() => Err("no certificate in PEM".to_owned()),
        Ok(all) => Ok(all),
        Err(_) => Err("certificates that are no PEM".to_owned()),
    }
}
