//! The server: allocator, logging, settings, signals and exit code.
//!
//! Exits with 0 after a drain, 1 if an address cannot be listened on, 2 for a bad
//! setting or flag.

mod process;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Command;
use process::{exit, fail, http_port, start_log, told_to_stop};
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::limits;
use sgl_kv_indexer::server::{Config, SETTINGS, Security, Server};
use sgl_kv_indexer::settings::{Invocation, SettingError, Settings};
use sgl_kv_indexer::version;
use tokio::net::TcpListener;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NAME: &str = "kv-indexer-server";

fn main() -> ExitCode {
    let command = Command::new(NAME)
        .version(version::LONG)
        .about("Serves the index of which LLM worker holds which KV cache block, over gRPC.");
    let invocation = Settings::read(SETTINGS, command, std::env::args_os(), |name| std::env::var_os(name));
    let settings = match invocation {
        Ok(Invocation::Run(settings)) => settings,
        Ok(Invocation::Exit { text, code }) => return exit(code, &text),
        Err(error) => return fail(NAME, 2, error),
    };
    match configure(&settings) {
        Ok((config, security)) => run(config, security),
        Err(error) => fail(NAME, 2, error),
    }
}

/// Reads all settings and starts the log with what is in force.
fn configure(settings: &Settings) -> Result<(Config, Security), SettingError> {
    let config = Config::from_settings(settings)?;
    let security = Security::from_settings(settings)?;
    start_log(settings)?;
    tracing::info!(
        target: "sgl_kv_indexer",
        version = version::NUMBER,
        commit = version::COMMIT,
        settings = %settings.in_force(SETTINGS),
        message_bytes_max = limits::MESSAGE_BYTES_MAX,
        hashes_per_call_max = limits::HASHES_PER_CALL_MAX,
        actions_per_apply_max = limits::ACTIONS_PER_APPLY_MAX,
        streams_per_connection_max = limits::STREAMS_PER_CONNECTION_MAX,
        "{NAME} starts"
    );
    Ok((config, security))
}

#[tokio::main]
async fn run(config: Config, security: Security) -> ExitCode {
    // Before a port is bound, so that no signal finds the process without a handler.
    let shutdown = match told_to_stop() {
        Ok(shutdown) => shutdown,
        Err(error) => return fail(NAME, 1, format!("cannot handle signals: {error}")),
    };
    let listener = match TcpListener::bind(config.listen_addr).await {
        Ok(listener) => listener,
        Err(error) => return fail(NAME, 1, format!("cannot listen on {}: {error}", config.listen_addr)),
    };
    let http = match http_port(config.http_addr, Config::default().http_addr).await {
        Ok(http) => http,
        Err(error) => return fail(NAME, 1, error),
    };
    let mut server = Server::new(config, Arc::new(Index::new())).with_security(security);
    if let Some(http) = http {
        server = server.with_http(http);
    }
    match server.serve(listener, shutdown).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(NAME, 1, format!("cannot serve: {error}")),
    }
}
