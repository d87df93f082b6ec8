//! What an operator asks of a server and tells it: `workers`, `drop-worker`.
//!
//! Both speak to the admin service at the server's address, which other servers of the
//! contract do not have.

use clap::Args;
use serde_json::{Value, json};

use super::asking::{tier_name, write_or_say};
use super::output::{self, Table};
use super::remote::{ServerArguments, failed};
use super::{Environment, Failure, Outcome};
use crate::pb::TierType;
use crate::pb::admin::{DropWorkerRequest, ListWorkersRequest, StreamState, Worker};

const TIERS: [TierType; 3] = [TierType::TierHbm, TierType::TierDram, TierType::TierSsd];

#[derive(Debug, Args)]
pub(super) struct Workers {
    #[command(flatten)]
    server: ServerArguments,
    /// Writes JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct DropWorker {
    #[command(flatten)]
    server: ServerArguments,
    /// The worker's id. Its bridge makes it known again, so stop that first if the worker is to stay away.
    worker_id: String,
}

impl Workers {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let mut client = self.server.admin(environment)?;
        let mut workers: Vec<Worker> = Vec::new();
        loop {
            let after = workers.last().map(|worker| worker.id.clone()).unwrap_or_default();
            let answer = client.list_workers(ListWorkersRequest { after, limit: 0 }).await;
            let page = answer.map_err(|status| failed(&status))?.into_inner();
            let is_last = !page.more || page.workers.is_empty();
            workers.extend(page.workers);
            if is_last {
                break;
            }
        }
        if self.json {
            let rows: Vec<Value> = workers.iter().map(row_json).collect();
            output::json(environment.out, &json!({"workers": rows}))?;
        } else {
            let mut table = Table::new(&["worker", "HBM", "DRAM", "SSD", "last heard", "stream", "address"]);
            for worker in &workers {
                let [hbm, dram, ssd] = TIERS.map(|tier| blocks(worker, tier).to_string());
                let heard =
                    worker.last_heard_ms.map_or("-".to_owned(), |ms| format!("{:.1} s", ms as f64 / 1e3));
                table.row([worker.id.clone(), hbm, dram, ssd, heard, state(worker), worker.address.clone()]);
            }
            write_or_say(&table, environment, "the server knows no worker")?;
        }
        Ok(Outcome::found(!workers.is_empty()))
    }
}

impl DropWorker {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let mut client = self.server.admin(environment)?;
        let answer = client.drop_worker(DropWorkerRequest { worker_id: self.worker_id.clone() }).await;
        let existed = answer.map_err(|status| failed(&status))?.into_inner().existed;
        // As it is quoted, a name cannot break the line.
        match existed {
            true => writeln!(environment.out, "dropped {:?}", self.worker_id)?,
            false => writeln!(environment.err, "there is no worker {:?}", self.worker_id)?,
        }
        Ok(Outcome::found(existed))
    }
}

fn blocks(worker: &Worker, tier: TierType) -> u64 {
    worker.blocks.iter().filter(|held| held.tier() == tier).map(|held| held.blocks).sum()
}

/// Whether the server knows all of it, or why answers leave it out.
fn state(worker: &Worker) -> String {
    let stream = match worker.stream() {
        StreamState::Unknown => "-",
        StreamState::Synchronising => "synchronising",
        StreamState::Synchronised => "synchronised",
    };
    if worker.silent { format!("silent, {stream}") } else { stream.to_owned() }
}

fn row_json(worker: &Worker) -> Value {
    let held = TIERS.map(|tier| (tier_name(tier.into()), Value::from(blocks(worker, tier))));
    json!({
        "worker": worker.id,
        "address": worker.address,
        "blocks": held.into_iter().collect::<serde_json::Map<_, _>>(),
        "last_seq": worker.last_seq,
        "last_heard_ms": worker.last_heard_ms,
        "silent": worker.silent,
        "stream": state(worker),
    })
}
