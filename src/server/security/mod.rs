//! Who may connect and who may call what.
//!
//! Three things, each with settings of its own and independent of the others: TLS
//! (`tls`), certificates asked of clients, and access to the two kinds of calls by
//! token or by the name in a client's certificate (`access`). All of it comes from
//! files, which are looked at again while the server runs (`kept`); what a file
//! holds never reaches a log or an error, its path does.
//!
//! Without any of these settings everybody who can connect may do everything, as
//! on a loopback address or behind a policy of the network.

mod access;
mod kept;
mod tls;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) use access::{Denied, Gate, Grants};
pub(super) use tls::Acceptor;

use crate::settings::{Setting, SettingError, Settings};

/// Pause between two looks at the files.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// Settings of this module, in the order of the help.
pub(super) const SETTINGS: [Setting; 7] = [
    tls::CERT_FILE,
    tls::KEY_FILE,
    tls::CLIENT_CA_FILE,
    access::QUERY_TOKEN_FILE,
    access::APPLY_TOKEN_FILE,
    access::QUERY_NAMES,
    access::APPLY_NAMES,
];

/// TLS and access as the settings ask for them, their files read.
#[derive(Debug, Clone, Default)]
pub struct Security {
    acceptor: Option<Arc<Acceptor>>,
    gate: Arc<Gate>,
}

impl Security {
    /// Reads the settings and their files.
    ///
    /// # Errors
    /// A setting that lacks another, or a file that cannot be used.
    pub fn from_settings(settings: &Settings) -> Result<Self, SettingError> {
        let acceptor = Acceptor::from_settings(settings)?.map(Arc::new);
        let asks_names = acceptor.as_ref().is_some_and(|acceptor| acceptor.asks_clients());
        let gate = Arc::new(Gate::from_settings(settings, asks_names)?);
        Ok(Security { acceptor, gate })
    }

    /// Whether anybody who can connect may do everything.
    pub fn is_open(&self) -> bool {
        let asks_clients = self.acceptor.as_ref().is_some_and(|acceptor| acceptor.asks_clients());
        !asks_clients && self.gate.is_open()
    }

    pub(super) fn acceptor(&self) -> Option<Arc<Acceptor>> {
        self.acceptor.clone()
    }

    pub(super) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Looks at the files again: new ones that can be used are, bad ones are told of once
    /// and the old ones stay.
    pub fn look_again(&self) {
        if let Some(acceptor) = &self.acceptor {
            acceptor.look_again();
        }
        self.gate.look_again();
    }

    /// Looks at the files again and again; for a task of its own.
    pub(super) async fn keep_looking(self) {
        if self.acceptor.is_none() && !self.gate.has_files() {
            return;
        }
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let again = self.clone();
            // Files may be far away. A panic in there is told of by its own message.
            let _ = tokio::task::spawn_blocking(move || again.look_again()).await;
        }
    }
}

/// The error of a setting whose file cannot be used.
fn unusable(setting: &Setting, path: &Path, why: impl std::fmt::Display) -> SettingError {
    let (name, value) = (setting.name, Some(path.display().to_string()));
    SettingError { name, value, takes: format!("a file that can be used: {why}") }
}
