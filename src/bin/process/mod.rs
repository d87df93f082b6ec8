//! What both binaries do as processes: the log, signals, the HTTP port, the end.

use std::future::Future;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;

use sgl_kv_indexer::settings::{LOG_FILTER, LOG_FILTER_TAKES, LOG_FORMAT, SettingError, Settings};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Starts the log on standard error, as the settings say.
///
/// # Errors
/// A setting has a value that it does not take; nothing is started.
pub(crate) fn start_log(settings: &Settings) -> Result<(), SettingError> {
    let filter = settings.parse(&LOG_FILTER, LOG_FILTER_TAKES, |text| EnvFilter::try_new(text).ok())?;
    let is_json = settings.parse(&LOG_FORMAT, "human or json", |text| match text {
        "human" => Some(false),
        "json" => Some(true),
        _ => None,
    })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    if is_json {
        log.json().flatten_event(true).init();
    } else {
        log.with_ansi(io::stderr().is_terminal()).init();
    }
    Ok(())
}

/// Handles SIGTERM and ctrl-c from now on; what it gives ends at the first of them.
///
/// # Errors
/// The system takes no handler.
pub(crate) fn told_to_stop() -> io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!(target: "sgl_kv_indexer", "SIGTERM received"),
            _ = interrupt.recv() => tracing::info!(target: "sgl_kv_indexer", "interrupted"),
        }
    })
}

/// The listener of the HTTP port. A port that nobody asked for, the `default` one, is no
/// reason to stop: if it cannot be had, the log says what to set.
///
/// # Errors
/// The address that was asked for cannot be listened on.
pub(crate) async fn http_port(
    address: Option<SocketAddr>,
    default: Option<SocketAddr>,
) -> Result<Option<TcpListener>, String> {
    let Some(asked_for) = address else { return Ok(None) };
    match TcpListener::bind(asked_for).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if address == default => {
            tracing::warn!(
                target: "sgl_kv_indexer",
                "no HTTP port: cannot listen on {asked_for}, the default: {error}; set KV_INDEXER_HTTP_ADDR to \
                 another address, or to off"
            );
            Ok(None)
        }
        Err(error) => Err(format!("cannot listen on {asked_for} (KV_INDEXER_HTTP_ADDR): {error}")),
    }
}

/// Prints what a command line asked for, or what is wrong with it.
pub(crate) fn exit(code: u8, text: &str) -> ExitCode {
    // A reader that closed its end of the pipe has read enough.
    let _ = match code {
        0 => io::stdout().write_all(text.as_bytes()),
        _ => io::stderr().write_all(text.as_bytes()),
    };
    ExitCode::from(code)
}

/// Prints in one line why `binary` ends.
pub(crate) fn fail(binary: &str, code: u8, error: impl std::fmt::Display) -> ExitCode {
    exit(code, &format!("{binary}: {error}\n"))
}
