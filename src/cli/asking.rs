//! One question each to a server: `query`, `match`, `hits`, `workers`.
//!
//! The contract has no list of workers, so `workers` asks who holds any of the blocks
//! that it is given. Lists longer than a call may carry are asked for in parts.

use std::collections::BTreeMap;

use clap::Args;
use serde_json::{Value, json};

use super::output::{self, Table};
use super::prompt::PromptArguments;
use super::remote::{ServerArguments, failed, unanswered};
use super::{Environment, Failure, Outcome};
use crate::arena::Tier;
use crate::client::{Client, Config, Prompt};
use crate::limits::HASHES_PER_CALL_MAX;
use crate::pb::{ExternalKvNodeMatch, GetExternalKvHitCountsRequest, MatchExternalKvRequest, TierHashes};

#[derive(Debug, Args)]
struct Question {
    #[command(flatten)]
    server: ServerArguments,
    #[command(flatten)]
    prompt: PromptArguments,
    /// Writes JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Query {
    #[command(flatten)]
    question: Question,
}

#[derive(Debug, Args)]
pub(super) struct Match {
    #[command(flatten)]
    question: Question,
    /// Adds one to the hit count of every block that is found.
    #[arg(long)]
    count_as_hit: bool,
}

#[derive(Debug, Args)]
pub(super) struct Hits {
    #[command(flatten)]
    question: Question,
}

#[derive(Debug, Args)]
pub(super) struct Workers {
    #[command(flatten)]
    question: Question,
}

impl Query {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let Question { server, prompt, json } = &self.question;
        let prompt = Prompt::new(&prompt.hashes(environment)?);
        let config = Config {
            deadline: server.timeout(),
            credentials: server.credentials(environment)?,
            ..Config::with_endpoints(server.endpoints(environment)?)
        };
        let client = Client::new(&config).map_err(|error| Failure::Input(error.to_string()))?;
        let answer = client.match_prefix(&prompt).await.map_err(|error| unanswered(&error))?;
        if *json {
            let matches: Vec<Value> = answer
                .matches()
                .map(|found| {
                    json!({
                        "worker": found.worker_id,
                        "address": found.address,
                        "blocks": found.blocks,
                        "match_rate": answer.match_rate(found.blocks),
                    })
                })
                .collect();
            let blocks_read = answer.blocks_read();
            let value = json!({"blocks": prompt.blocks(), "blocks_read": blocks_read, "matches": matches});
            output::json(environment.out, &value)?;
        } else {
            let mut table = Table::new(&["worker", "blocks", "rate", "address"]);
            for found in answer.matches() {
                let rate = format!("{:.1}%", 100.0 * answer.match_rate(found.blocks));
                table.row([
                    found.worker_id.to_owned(),
                    found.blocks.to_string(),
                    rate,
                    found.address.to_owned(),
                ]);
            }
            write_or_say(&table, environment, "no worker has the first block")?;
        }
        Ok(Outcome::found(!answer.is_empty()))
    }
}

impl Match {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let Question { server, prompt, json } = &self.question;
        let hashes = prompt.hashes(environment)?;
        let found = matches(server, &hashes, self.count_as_hit, environment).await?;
        if *json {
            let rows: Vec<Value> = found.iter().map(node_json).collect();
            output::json(environment.out, &json!({"matches": rows}))?;
        } else {
            let mut table = Table::new(&["worker", "tier", "block", "components", "tokens", "address"]);
            for node in &found {
                for tier in &node.hashes_by_tier {
                    for (place, hash) in tier.hashes.iter().enumerate() {
                        let number = |column: &[u32]| column.get(place).copied().unwrap_or(0).to_string();
                        table.row([
                            node.worker_id.clone(),
                            tier_name(tier.tier),
                            hash.to_string(),
                            number(&tier.component_masks),
                            number(&tier.block_sizes),
                            node.address.clone(),
                        ]);
                    }
                }
            }
            write_or_say(&table, environment, "nobody holds any of the blocks")?;
        }
        Ok(Outcome::found(!found.is_empty()))
    }
}

impl Workers {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let Question { server, prompt, json } = &self.question;
        let hashes = prompt.hashes(environment)?;
        let found = matches(server, &hashes, false, environment).await?;
        let mut workers: BTreeMap<(&str, &str), [usize; 3]> = BTreeMap::new();
        for node in &found {
            let counts = workers.entry((&node.worker_id, &node.address)).or_default();
            for tier in &node.hashes_by_tier {
                if let Some(known) = Tier::from_wire(tier.tier) {
                    counts[known as usize - 1] += tier.hashes.len();
                }
            }
        }
        let mut table = Table::new(&["worker", "HBM", "DRAM", "SSD", "address"]);
        let mut rows = Vec::new();
        for ((worker, address), [hbm, dram, ssd]) in workers {
            table.row([
                worker.to_owned(),
                hbm.to_string(),
                dram.to_string(),
                ssd.to_string(),
                address.to_owned(),
            ]);
            rows.push(json!({"worker": worker, "address": address, "HBM": hbm, "DRAM": dram, "SSD": ssd}));
        }
        if *json {
            output::json(environment.out, &json!({"workers": rows}))?;
        } else {
            write_or_say(&table, environment, "nobody holds any of the blocks")?;
        }
        Ok(Outcome::found(!found.is_empty()))
    }
}

impl Hits {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let Question { server, prompt, json } = &self.question;
        let hashes = prompt.hashes(environment)?;
        let mut client = server.client(environment)?;
        let mut entries = Vec::new();
        for part in hashes.chunks(HASHES_PER_CALL_MAX) {
            let request = GetExternalKvHitCountsRequest { hashes: part.to_vec() };
            let answer = client.get_external_kv_hit_counts(request).await;
            entries.extend(answer.map_err(|status| failed(&status))?.into_inner().entries);
        }
        if *json {
            let rows: Vec<Value> = entries
                .iter()
                .map(|entry| json!({"block": output::hash(entry.hash), "hits": entry.hit_count_total}))
                .collect();
            output::json(environment.out, &json!({"hits": rows}))?;
        } else {
            let mut table = Table::new(&["block", "hits"]);
            for entry in &entries {
                table.row([entry.hash.to_string(), entry.hit_count_total.to_string()]);
            }
            write_or_say(&table, environment, "none of the blocks has a count")?;
        }
        Ok(Outcome::found(!entries.is_empty()))
    }
}

/// Who holds which of these blocks; a worker has a row per part.
async fn matches(
    server: &ServerArguments,
    hashes: &[i64],
    count_as_hit: bool,
    environment: &Environment<'_>,
) -> Result<Vec<ExternalKvNodeMatch>, Failure> {
    let mut client = server.client(environment)?;
    let mut found = Vec::new();
    for part in hashes.chunks(HASHES_PER_CALL_MAX) {
        let request = MatchExternalKvRequest { hashes: part.to_vec(), count_as_hit };
        let answer = client.match_external_kv(request).await;
        found.extend(answer.map_err(|status| failed(&status))?.into_inner().matches);
    }
    Ok(found)
}

fn node_json(node: &ExternalKvNodeMatch) -> Value {
    let tier = |tier: &TierHashes| {
        json!({
            "tier": tier_name(tier.tier),
            "blocks": tier.hashes.iter().copied().map(output::hash).collect::<Vec<_>>(),
            "components": tier.component_masks,
            "tokens": tier.block_sizes,
        })
    };
    let tiers: Vec<Value> = node.hashes_by_tier.iter().map(tier).collect();
    json!({"worker": node.worker_id, "address": node.address, "tiers": tiers})
}

/// A tier's name, or the number of one that this build does not know.
pub(super) fn tier_name(number: i32) -> String {
    match Tier::from_wire(number) {
        Some(Tier::Hbm) => "HBM".to_owned(),
        Some(Tier::Dram) => "DRAM".to_owned(),
        Some(Tier::Ssd) => "SSD".to_owned(),
        None => number.to_string(),
    }
}

fn write_or_say(table: &Table, environment: &mut Environment<'_>, nothing: &str) -> Result<(), Failure> {
    if table.is_empty() {
        writeln!(environment.err, "{nothing}")?;
        return Ok(());
    }
    Ok(table.write(environment.out)?)
}
