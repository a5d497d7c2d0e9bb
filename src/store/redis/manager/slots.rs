//! Which node of a cluster has what (Redis Cluster specification, "Key distribution model").

use redis::aio::MultiplexedConnection;
use redis::{Arg, Cmd, FromRedisValue, RedisResult, Value};

use super::connector::Address;

/// How many slots there are.
const SLOTS: u16 = 16384;

/// The primary of each slot.
#[derive(Clone)]
pub(super) struct Slots {
    /// First, last, and which of the primaries.
    ranges: Vec<(u16, u16, usize)>,
    primaries: Vec<Address>,
    /// Primaries and replicas: the nodes to ask after a complete change of topology.
    all: Vec<Address>,
}

impl Slots {
    pub(super) fn primaries(&self) -> &[Address] {
        &self.primaries
    }

    pub(super) fn all(&self) -> &[Address] {
        &self.all
    }

    /// The primary that has a slot.
    pub(super) fn primary(&self, slot: u16) -> Option<&Address> {
        self.primaries.get(self.place(slot)?)
    }

    /// The place of that primary among them.
    pub(super) fn place(&self, slot: u16) -> Option<usize> {
        self.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot)).map(|(_, _, place)| *place)
    }

    /// A slot that no node has.
    pub(super) fn hole(&self) -> Option<u16> {
        let mut ranges = self.ranges.clone();
        ranges.sort_unstable();
        let mut next = 0;
        for (first, last, _) in ranges {
            if first > next {
                return Some(next);
            }
            next = next.max(last + 1);
        }
        (next < SLOTS).then_some(next)
    }

    /// Reads what `CLUSTER SLOTS` says at a node.
    fn read(response: &Value, asked: &Address) -> Option<Self> {
        let mut slots = Self { ranges: Vec::new(), primaries: Vec::new(), all: Vec::new() };
        let Value::Array(ranges) = response else { return None };
        for range in ranges {
            let Value::Array(range) = range else { return None };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &range[..] else { return None };
            let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
            if last >= SLOTS {
                return None;
            }
            for (place, node) in nodes.iter().enumerate() {
                let Some(address) = address(node, asked) else { continue };
                if place == 0 {
                    let known = slots.primaries.iter().position(|known| *known == address);
                    let primary = known.unwrap_or_else(|| {
                        slots.primaries.push(address.clone());
                        slots.primaries.len() - 1
                    });
                    slots.ranges.push((first, last, primary));
                }
                if !slots.all.contains(&address) {
                    slots.all.push(address);
                }
            }
        }
        Some(slots)
    }
}

/// A node's view of its cluster.
pub(super) struct ClusterView {
    pub(super) slots: Slots,
    /// Whether the node sees the cluster as working. A node that is partitioned from the others does not.
    is_well: bool,
    /// The latest configuration epoch that it knows.
    epoch: u64,
}

impl ClusterView {
    /// Asks a node for its view.
    pub(super) async fn of(connection: &MultiplexedConnection, address: &Address) -> RedisResult<Self> {
        let ask = async |part: &str| -> RedisResult<Value> {
            redis::cmd("CLUSTER").arg(part).query_async(&mut connection.clone()).await
        };
        // A user without the right to INFO may still have the right to SLOTS.
        let (slots, info) = tokio::join!(ask("SLOTS"), ask("INFO"));
        let slots = Slots::read(&slots?, address).ok_or_else(|| {
            redis::RedisError::from((
                redis::ErrorKind::UnexpectedReturnType,
                "the reply to CLUSTER SLOTS cannot be parsed",
            ))
        })?;
        let info = info.and_then(|info| String::from_redis_value(info).map_err(Into::into)).unwrap_or_default();
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let epoch = field("cluster_current_epoch").and_then(|epoch| epoch.trim().parse().ok()).unwrap_or_default();
        Ok(Self { slots, is_well: field("cluster_state").is_some_and(|state| state.trim() == "ok"), epoch })
    }

    /// Whether the view is complete, so that no other node needs to be asked.
    pub(super) fn is_good(&self) -> bool {
        self.is_well && self.slots.hole().is_none()
    }

    /// The view with the greatest weight is used.
    pub(super) fn weight(&self) -> (bool, bool, u64) {
        (self.is_well, self.slots.hole().is_none(), self.epoch)
    }
}

/// The address of a node; the address that was asked if the node does not know its own name.
fn address(node: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(node) = node else { return None };
    let port = match node.get(1)? {
        Value::Int(port) => u16::try_from(*port).ok().filter(|port| *port > 0)?,
        _ => return None,
    };
    let host = match node.first()? {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?.to_owned(),
        Value::SimpleString(host) => host.clone(),
        _ => String::new(),
    };
    Some((if host.is_empty() || host == "?" { asked.0.clone() } else { host }, port))
}

/// The slot of a command; `None` if any node can execute it.
pub(super) fn slot_of(command: &Cmd) -> Option<u16> {
    let mut arguments = command.args_iter().map(|argument| match argument {
        Arg::Simple(argument) => argument,
        _ => &b""[..],
    });
    let name = arguments.next()?;
    let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
    if is("EVALSHA") || is("EVAL") {
        let keys = arguments.nth(1)?;
        return if keys == b"0" { None } else { arguments.next().map(slot) };
    }
    if ["PING", "INFO", "CONFIG", "PUBLISH", "SCRIPT", "TIME", "WAIT"].into_iter().any(is) {
        return None;
    }
    arguments.next().map(slot)
}

/// The slot of a key: that of its hash tag, if it has one.
pub(super) fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let length = rest.iter().position(|byte| *byte == b'}').filter(|length| *length > 0)?;
        Some(&rest[..length])
    });
    crc(tag.unwrap_or(key)) % SLOTS
}

/// CRC16 in its XMODEM variant.
fn crc(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |mut crc: u16, byte| {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
        crc
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_where_the_specification_says() {
        assert_eq!(crc(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"{user1000}.followers"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
        assert_eq!(slot(b"foo{}{bar}"), crc(b"foo{}{bar}") % SLOTS);
    }

    #[test]
    fn commands_go_where_their_keys_are() {
        assert_eq!(slot_of(redis::cmd("GET").arg("foo")), Some(12182));
        assert_eq!(slot_of(redis::cmd("evalsha").arg("0a").arg(1).arg("foo").arg("x")), Some(12182));
        assert_eq!(slot_of(redis::cmd("EVAL").arg("return 1").arg(0).arg("x")), None);
        assert_eq!(slot_of(redis::cmd("INFO").arg("server")), None);
    }

    #[test]
    fn a_cluster_with_a_hole_is_seen() {
        let node = |host: &str, port| Value::Array(vec![Value::BulkString(host.into()), Value::Int(port)]);
        let response = |last| {
            Value::Array(vec![
                Value::Array(vec![Value::Int(8192), Value::Int(last), node("", 2), node("c", 3)]),
                Value::Array(vec![Value::Int(0), Value::Int(8191), node("b", 1)]),
            ])
        };
        let asked = ("a".to_owned(), 9);
        let slots = Slots::read(&response(16383), &asked).unwrap();
        assert_eq!(slots.hole(), None);
        assert_eq!(slots.primary(8192), Some(&("a".to_owned(), 2)));
        assert_eq!(slots.primary(0), Some(&("b".to_owned(), 1)));
        assert_eq!(slots.all().len(), 3);
        assert_eq!(Slots::read(&response(16000), &asked).unwrap().hole(), Some(16001));
        assert!(Slots::read(&Value::Nil, &asked).is_none());
    }
}
