//! How a client knows its servers, and how it shows who it is.
//!
//! All of it comes as text: the library reads no files. What was renewed is used by a
//! client made anew. None of it reaches a log or an error.

use std::fmt;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::ConfigError;

/// What servers with TLS or tokens ask for; none of it by default.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Authorities in PEM, one of which must have signed the servers' certificates. Required with `https://`.
    pub authorities_pem: Option<String>,
    /// The client's own certificate and chain, and its private key, both in PEM.
    pub identity_pem: Option<(String, String)>,
    /// The token that allows queries, sent as `authorization: Bearer TOKEN`.
    pub token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("authorities_pem", &self.authorities_pem.is_some())
            .field("identity_pem", &self.identity_pem.is_some())
            .field("token", &self.token.is_some())
            .finish()
    }
}

impl Credentials {
    /// Puts TLS into the connection of an `https://` endpoint.
    pub(super) fn secure(&self, endpoint: Endpoint, name: &str) -> Result<Endpoint, ConfigError> {
        let Some(authorities) = &self.authorities_pem else {
            return Err(ConfigError::Authorities { endpoint: name.to_owned() });
        };
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authorities));
        if let Some((certificate, key)) = &self.identity_pem {
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        endpoint.tls_config(tls).map_err(|_| ConfigError::Credentials)
    }

    /// The token as the header's value.
    pub(crate) fn bearer(&self) -> Result<Option<MetadataValue<Ascii>>, ConfigError> {
        let Some(token) = &self.token else { return Ok(None) };
        let value = format!("Bearer {token}").parse::<MetadataValue<Ascii>>();
        let mut value = value.map_err(|_| ConfigError::Credentials)?;
        // Kept out of HTTP/2's tables and of any log of headers.
        value.set_sensitive(true);
        Ok(Some(value))
    }
}
