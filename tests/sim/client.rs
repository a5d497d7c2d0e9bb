//! Clients: they send, send again, change their mind, and vanish.

use std::sync::Arc;
use std::time::Duration;

use oncegate::http::accept::AcceptSettings;
use oncegate::http::limits::Limits;
use oncegate::http::server::{ServerState, connection};
use oncegate::http::usage::Usage;
use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::dice::Dice;
use crate::history::{Answer, Event, Label, Request};
use crate::life::Life;
use crate::pipe::{Cable, Settlement, pipe};
use crate::setup::{PATHS, TENANTS, body, id_of, key};
use crate::wire::Reader;
use crate::world::{METRICS, World};

/// Longer than any gate may take for an answer, whatever fails: see the bounds of the gate's settings.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What a client wants done.
#[derive(Clone, Copy, Debug)]
pub struct Errand {
    pub label: Label,
    pub variant: usize,
    /// How often it asks at most.
    pub tries: u32,
    /// When it begins.
    pub start: Duration,
}

/// Asks until it has had enough, or the run calms down.
pub async fn pursue(world: Arc<World>, errand: Errand, mut dice: Dice) {
    sleep(errand.start).await;
    for _ in 0..errand.tries {
        if world.is_calm() {
            return;
        }
        let mut askers = Vec::new();
        for _ in 0..dice.weighted(&[(80, 1), (15, 2), (5, 3)]) {
            let Some(life) = world.any_gate(&mut dice) else { break };
            let (world, dice) = (Arc::clone(&world), dice.fork());
            askers.push(tokio::spawn(async move { ask(&world, &life, errand, false, dice).await }));
        }
        let mut last = None;
        for asker in askers {
            last = asker.await.unwrap();
        }
        let path = last.as_ref().filter(|answer| answer.status == 202).and_then(|answer| answer.header("location"));
        if let Some(path) = path {
            let path = path.to_owned();
            for _ in 0..dice.within(0..4) {
                sleep(dice.millis(1..700)).await;
                let Some(life) = world.any_gate(&mut dice) else { break };
                if poll(&world, &life, errand.label, &path).await {
                    break;
                }
            }
        }
        sleep(pause(last.as_ref(), &mut dice)).await;
    }
}

/// How long a client waits before it asks again.
fn pause(last: Option<&Answer>, dice: &mut Dice) -> Duration {
    let told = last.and_then(|answer| answer.header("retry-after")?.parse().ok());
    match told {
        Some(seconds) if dice.percent(40) => Duration::from_secs(seconds).min(Duration::from_secs(3)),
        _ if dice.percent(30) => Duration::ZERO,
        _ => dice.millis(1..1_500),
    }
}

/// Sends one request, and returns its answer where there is a whole one.
pub async fn ask(
    world: &Arc<World>,
    life: &Arc<Life>,
    errand: Errand,
    is_probe: bool,
    mut dice: Dice,
) -> Option<Answer> {
    let request = world.next_request();
    let (mut stream, _) = connect(life, if is_probe { 16_384 } else { dice.pick(&[64, 512, 16_384]) });
    let Errand { label, variant, .. } = errand;
    world.history.add(Event::Sent { request, life: life.number, label, variant, is_probe });

    let leaves = (!is_probe && dice.percent(12)).then(|| Instant::now() + dice.millis(0..2_500));
    let mut exchange = Box::pin(exchange(&mut stream, request, errand, is_probe, &mut dice));
    let heard = match leaves {
        Some(leaves) => match timeout_at(leaves, exchange.as_mut()).await {
            Ok(heard) => heard,
            Err(_) => Heard::Left,
        },
        None => timeout(PATIENCE, exchange.as_mut()).await.unwrap_or(Heard::Nothing),
    };
    drop(exchange);
    match heard {
        Heard::Answer(answer) => {
            world.history.add(Event::Answered { request, answer: answer.clone() });
            return Some(answer);
        }
        Heard::Lost => world.history.add(Event::Lost { request }),
        Heard::Left => world.history.add(Event::Left { request }),
        // Nobody answers for a gate that is dead, and its client learns of it in its own time.
        Heard::Nothing if life.is_dead() => world.history.add(Event::Lost { request }),
        Heard::Nothing => world.history.add(Event::Hung { request }),
    }
    None
}

/// Asks for the status of an accepted request. Whether that is final.
pub async fn poll(world: &Arc<World>, life: &Arc<Life>, label: Label, path: &str) -> bool {
    assert!(path.ends_with(&id_of(label).to_string()), "{path} is of another request");
    let poll = world.next_poll();
    let (mut stream, _) = connect(life, 16_384);
    world.history.add(Event::Polls { poll, life: life.number, label });
    let tenant = TENANTS[label.tenant];
    let bytes = format!("GET {path} HTTP/1.1\r\nHost: app\r\nX-Tenant: {tenant}\r\n\r\n");
    let _ = stream.write_all(bytes.as_bytes()).await;
    let Ok(Ok(Some(message))) = timeout(PATIENCE, Reader::new().next(&mut stream)).await else { return false };
    let word = |name: &str| {
        let text = String::from_utf8_lossy(&message.body);
        let (_, rest) = text.split_once(&format!("\"{name}\":\""))?;
        rest.split('"').next().map(str::to_owned)
    };
    let word = word("state").or_else(|| word("code")).unwrap_or_else(|| message.line.clone());
    let is_final = matches!(&*word, "completed" | "unknown" | "dead");
    world.history.add(Event::Polled { poll, word });
    is_final
}

/// A connection to a gate.
fn connect(life: &Arc<Life>, buffer: usize) -> (Settlement, Cable) {
    let (near, far, cable) = pipe(buffer, None);
    life.holds_client(&cable);
    let peer = ([127, 0, 0, 1], 1).into();
    let usage = Usage::new(&Limits::default(), &METRICS);
    let current = ServerState::current(life.gate(), Limits::default(), AcceptSettings::default(), usage);
    tokio::spawn(connection(near, peer, current, life.stop()));
    (far, cable)
}

enum Heard {
    Answer(Answer),
    Lost,
    Left,
    Nothing,
}

async fn exchange(stream: &mut Settlement, request: Request, errand: Errand, is_probe: bool, dice: &mut Dice) -> Heard {
    let bytes = bytes(request, errand, dice);
    if !is_probe && dice.percent(15) {
        let cut = dice.within(0..bytes.len() as u64) as usize;
        let _ = stream.write_all(&bytes[..cut]).await;
        sleep(dice.millis(1..400)).await;
        if dice.percent(30) {
            return Heard::Left;
        }
        let _ = stream.write_all(&bytes[cut..]).await;
    } else {
        let _ = stream.write_all(&bytes).await;
    }
    match Reader::new().next(stream).await {
        Ok(Some(message)) => {
            let mut words = message.line.splitn(3, ' ').skip(1);
            Heard::Answer(Answer {
                status: words.next().unwrap().parse().unwrap(),
                reason: words.next().unwrap_or_default().to_owned(),
                headers: message.headers.into_iter().filter(|(name, _)| name != "date").collect(),
                body: message.body,
            })
        }
        Ok(None) | Err(_) => Heard::Lost,
    }
}

fn bytes(request: Request, errand: Errand, dice: &mut Dice) -> Vec<u8> {
    let Errand { label, variant, .. } = errand;
    let (path, tenant, body) = (PATHS[label.route], TENANTS[label.tenant], body(variant, dice.percent(30)));
    let quote = if dice.percent(50) { "\"" } else { "" };
    format!(
        "POST {path} HTTP/1.1\r\nHost: app\r\nContent-Type: application/json\r\nContent-Length: {}\r\nX-Tenant: {tenant}\r\n\
         X-Request: {}\r\nIdempotency-Key: {quote}{}{quote}\r\n\r\n{body}",
        body.len(),
        request.0,
        key(label.key),
    )
    .into_bytes()
}
