//! `kv-indexer-bridge`: follows engines' KV events and reports them to a server.
//!
//! Sets the allocator, logging, configuration and exit code; everything else is
//! [`sgl_kv_indexer::bridge`]'s. Exits 0 when told to stop, 1 when the server
//! refuses a batch for good or an address cannot be listened on, 2 on a bad setting.

mod process;

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Command;
use process::{exit, fail, http_port, start_log, told_to_stop};
use sgl_kv_indexer::bridge::config::{Config, TABLE};
use sgl_kv_indexer::bridge::{Bridge, RunError, observe, streams};
use sgl_kv_indexer::http::Port;
use sgl_kv_indexer::settings::{Invocation, Settings};
use sgl_kv_indexer::version;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NAME: &str = "kv-indexer-bridge";

fn main() -> ExitCode {
    let command = Command::new(NAME)
        .version(version::LONG)
        .about("Follows engines' KV cache events and reports them to a kv-indexer-server.");
    let invocation = Settings::read(TABLE, command, std::env::args_os(), |name| std::env::var_os(name));
    let settings = match invocation {
        Ok(Invocation::Run(settings)) => settings,
        Ok(Invocation::Exit { text, code }) => return exit(code, &text),
        Err(error) => return fail(NAME, 2, error),
    };
    match configure(&settings) {
        Ok((configs, http_addr)) => run(configs, http_addr),
        Err(error) => fail(NAME, 2, error),
    }
}

/// Reads all settings and starts the log with what is in force.
fn configure(settings: &Settings) -> Result<(Vec<Config>, Option<SocketAddr>), String> {
    let configs = streams::read(settings).map_err(|error| error.to_string())?;
    let http_addr = observe::http_addr(settings).map_err(|error| error.to_string())?;
    start_log(settings).map_err(|error| error.to_string())?;
    tracing::info!(
        target: "sgl_kv_indexer",
        version = version::NUMBER,
        commit = version::COMMIT,
        settings = %settings.in_force(TABLE),
        streams = configs.len(),
        pending_bytes_max = sgl_kv_indexer::bridge::PENDING_BYTES_MAX,
        "{NAME} starts"
    );
    Ok((configs, http_addr))
}

#[tokio::main]
async fn run(configs: Vec<Config>, http_addr: Option<SocketAddr>) -> ExitCode {
    // Before anything is connected, so that no signal is missed.
    let shutdown = match told_to_stop() {
        Ok(shutdown) => shutdown,
        Err(error) => return fail(NAME, 1, format!("cannot handle signals: {error}")),
    };
    let bridge = Bridge::new(configs);
    let pages = match http_port(http_addr, None).await {
        Ok(None) => None,
        Ok(Some(listener)) => match Port::open(listener, observe::pages(bridge.statuses())) {
            Ok(port) => Some(port),
            Err(error) => return fail(NAME, 1, error),
        },
        Err(error) => return fail(NAME, 1, error),
    };
    let ended = bridge.run(shutdown).await;
    if let Some(pages) = pages {
        pages.close().await;
    }
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ RunError::Server(_)) => fail(NAME, 2, error),
        Err(error @ (RunError::Refused(_) | RunError::Panicked)) => fail(NAME, 1, error),
    }
}
