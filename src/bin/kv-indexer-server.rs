//! The server: allocator, logging, settings, signals and exit code.
//!
//! Exits with 0 after a drain, 1 if an address cannot be listened on, 2 for a bad
//! setting or flag. An HTTP port that nobody asked for, the default one, is no
//! reason to stop: if it is taken, the log says what to set.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Command;
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::server::{Config, SETTINGS, Server};
use sgl_kv_indexer::settings::{Invocation, LOG_FILTER, LOG_FILTER_TAKES, SettingError, Settings};
use sgl_kv_indexer::version;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let command = Command::new("kv-indexer-server")
        .version(version::LONG)
        .about("Serves the index of which LLM worker holds which KV cache block, over gRPC.");
    let invocation = Settings::read(SETTINGS, command, std::env::args_os(), |name| std::env::var_os(name));
    let settings = match invocation {
        Ok(Invocation::Run(settings)) => settings,
        Ok(Invocation::Exit { text, code }) => return exit(code, &text),
        Err(error) => return fail(2, error),
    };
    match configure(&settings) {
        Ok(config) => run(config),
        Err(error) => fail(2, error),
    }
}

/// Reads all settings and starts the log.
fn configure(settings: &Settings) -> Result<Config, SettingError> {
    let config = Config::from_settings(settings)?;
    let filter = settings.parse(&LOG_FILTER, LOG_FILTER_TAKES, |text| EnvFilter::try_new(text).ok())?;
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
    Ok(config)
}

#[tokio::main]
async fn run(config: Config) -> ExitCode {
    // Before the port is bound, so that no signal finds the process without a handler.
    let (mut terminate, mut interrupt) =
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
            (Err(error), _) | (_, Err(error)) => return fail(1, format!("cannot handle signals: {error}")),
        };
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM received"),
            _ = interrupt.recv() => tracing::info!("interrupted"),
        }
    };
    let listener = match TcpListener::bind(config.listen_addr).await {
        Ok(listener) => listener,
        Err(error) => return fail(1, format!("cannot listen on {}: {error}", config.listen_addr)),
    };
    let http = match http_port(&config).await {
        Ok(http) => http,
        Err(error) => return fail(1, error),
    };
    let mut server = Server::new(config, Arc::new(Index::new()));
    if let Some(http) = http {
        server = server.with_http(http);
    }
    match server.serve(listener, shutdown).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, format!("cannot serve: {error}")),
    }
}

/// The listener of the HTTP port, if there is to be one.
async fn http_port(config: &Config) -> Result<Option<TcpListener>, String> {
    let Some(address) = config.http_addr else { return Ok(None) };
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if config.http_addr == Config::default().http_addr => {
            tracing::warn!(
                "no HTTP port: cannot listen on {address}, the default: {error}; set KV_INDEXER_HTTP_ADDR to \
                 another address, or to off"
            );
            Ok(None)
        }
        Err(error) => Err(format!("cannot listen on {address} (KV_INDEXER_HTTP_ADDR): {error}")),
    }
}

/// Prints what a command line asked for, or what is wrong with it.
fn exit(code: u8, text: &str) -> ExitCode {
    // A reader that closed its end of the pipe has read enough.
    let _ = match code {
        0 => std::io::stdout().write_all(text.as_bytes()),
        _ => std::io::stderr().write_all(text.as_bytes()),
    };
    ExitCode::from(code)
}

fn fail(code: u8, error: impl std::fmt::Display) -> ExitCode {
    exit(code, &format!("kv-indexer-server: {error}\n"))
}
