//! How much of the limits is in use.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::budget::{Budget, Permit};
use super::counted_buffer::counted;
use super::limits::Limits;
use super::refusal::Refusals;
use crate::telemetry::limits::{Limit, LimitMetrics};
use crate::telemetry::metrics::Metrics;

/// This many bytes of each response are buffered even if the budget is exhausted: the number of requests bounds them.
pub(super) const UNCOUNTED_BODY: usize = 64 << 10;

/// The current usage of the limits: one for the process, kept across reloads.
pub struct Usage {
    /// Requests in flight.
    pub requests: Arc<Budget>,
    /// Requests that wait for another's attempt.
    pub waiting: Arc<Budget>,
    /// Bytes of bodies in memory.
    pub memory: Arc<Budget>,
    /// Bytes of bodies in temporary files.
    pub disk: Arc<Budget>,
    connections: Arc<Budget>,
    addresses: Arc<NetworkConnections>,
    /// Answers connections that exceed a limit.
    pub(super) refusals: Refusals,
    metrics: Arc<LimitMetrics>,
}

/// The right to one client connection. Dropping it returns the right.
pub struct ConnectionPermit {
    _permit: Permit,
    addresses: Arc<NetworkConnections>,
    /// `None` until the client's address is known.
    network: Option<Network>,
}

struct NetworkConnections {
    max: AtomicU64,
    connections: Mutex<HashMap<Network, u64>>,
}

/// The addresses that count as one client: an IPv4 address, or an IPv6 /64.
type Network = u64;

impl Usage {
    /// No usage yet.
    #[must_use]
    pub fn new(limits: &Limits, metrics: &Metrics) -> Arc<Self> {
        let metrics = metrics.limits();
        let budget = |limit, max| Budget::new(limit, max, &metrics);
        Arc::new(Self {
            requests: budget(Limit::MaxRequests, limits.max_requests),
            waiting: budget(Limit::MaxWaiting, limits.max_waiting),
            memory: budget(Limit::MaxBufferedMemory, limits.max_buffered_memory),
            disk: budget(Limit::MaxBufferedDisk, limits.max_buffered_disk),
            connections: budget(Limit::MaxConnections, limits.max_connections),
            addresses: Arc::new(NetworkConnections {
                max: AtomicU64::new(limits.max_connections_per_address),
                connections: Mutex::default(),
            }),
            refusals: Refusals::new(),
            metrics,
        })
    }

    /// Changes all limits. Existing permits stay valid.
    pub fn set_limits(&self, limits: &Limits) {
        self.requests.set_max(limits.max_requests);
        self.waiting.set_max(limits.max_waiting);
        self.memory.set_max(limits.max_buffered_memory);
        self.disk.set_max(limits.max_buffered_disk);
        self.connections.set_max(limits.max_connections);
        self.addresses.max.store(limits.max_connections_per_address, Ordering::Relaxed);
    }

    /// Counts the bytes of a body against `memory` until their last reference is dropped. Returns `None` where the
    /// budget has no room. Small bodies are not counted: the number of requests bounds them.
    #[must_use]
    pub fn count_body(memory: &Arc<Budget>, body: Bytes) -> Option<Bytes> {
        if body.len() <= UNCOUNTED_BODY {
            return Some(body);
        }
        let permit = memory.acquire(body.len() as u64)?;
        Some(counted(body, permit))
    }

    /// Counts that a limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.metrics.exceeded(limit);
    }

    /// Acquires a permit for a connection from this address, or returns the limit that is reached.
    pub fn connection(&self, ip: IpAddr) -> Result<ConnectionPermit, Limit> {
        let Some(permit) = self.connections.acquire(1) else { return Err(Limit::MaxConnections) };
        let network = network(ip);
        if self.addresses.acquire(network) {
            return Ok(ConnectionPermit {
                _permit: permit,
                addresses: Arc::clone(&self.addresses),
                network: Some(network),
            });
        }
        self.exceeded(Limit::MaxConnectionsPerAddress);
        Err(Limit::MaxConnectionsPerAddress)
    }
}

impl Usage {
    /// Acquires a permit for a connection whose PROXY header has yet to name the client, or returns the limit that is
    /// reached.
    pub(super) fn proxied_connection(&self) -> Result<ConnectionPermit, Limit> {
        let Some(permit) = self.connections.acquire(1) else { return Err(Limit::MaxConnections) };
        Ok(ConnectionPermit { _permit: permit, addresses: Arc::clone(&self.addresses), network: None })
    }

    /// Counts the permit's connection for the client at this address, or returns the limit that is reached.
    pub(super) fn identify(&self, mut permit: ConnectionPermit, ip: IpAddr) -> Result<ConnectionPermit, Limit> {
        let network = network(ip);
        if permit.network.is_none() {
            if !self.addresses.acquire(network) {
                self.exceeded(Limit::MaxConnectionsPerAddress);
                return Err(Limit::MaxConnectionsPerAddress);
            }
            permit.network = Some(network);
        }
        Ok(permit)
    }
}

impl NetworkConnections {
    fn acquire(&self, network: Network) -> bool {
        let max = self.max.load(Ordering::Relaxed);
        match self.connections().entry(network) {
            Entry::Occupied(entry) if *entry.get() >= max => false,
            Entry::Occupied(mut entry) => {
                *entry.get_mut() += 1;
                true
            }
            Entry::Vacant(entry) => {
                entry.insert(1);
                true
            }
        }
    }

    fn release(&self, network: Network) {
        if let Entry::Occupied(mut entry) = self.connections().entry(network) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<Network, u64>> {
        // No operation under this lock can leave the state inconsistent.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some(network) = self.network {
            self.addresses.release(network);
        }
    }
}

fn network(ip: IpAddr) -> Network {
    match ip.to_canonical() {
        // Mapped into ::/64, which has no other client addresses.
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => match (ip.to_bits() >> 64) as u64 {
            0 => u64::MAX,
            network => network,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn usage(all: u64, each: u64) -> Arc<Usage> {
        let limits = Limits { max_connections: all, max_connections_per_address: each, ..Limits::default() };
        Usage::new(&limits, &Metrics::new())
    }

    #[test]
    fn each_network_has_its_own_permits() {
        let usage = usage(10, 2);
        let first = usage.connection(ip("2001:db8::1")).unwrap();
        let _second = usage.connection(ip("2001:db8::ffff:2")).unwrap();
        assert_eq!(usage.connection(ip("2001:db8::3")).err(), Some(Limit::MaxConnectionsPerAddress));
        let _next = usage.connection(ip("2001:db8:0:1::3")).unwrap();
        let _loopback = usage.connection(ip("::1")).unwrap();
        drop(first);
        let _third = usage.connection(ip("2001:db8::3")).unwrap();
        let _old = usage.connection(ip("10.0.0.1")).unwrap();
        let _mapped = usage.connection(ip("::ffff:10.0.0.1")).unwrap();
        assert_eq!(usage.connection(ip("10.0.0.1")).err(), Some(Limit::MaxConnectionsPerAddress));
        let _neighbour = usage.connection(ip("10.0.0.2")).unwrap();
    }

    #[test]
    fn refused_and_closed_connections_leave_no_entries() {
        let usage = usage(2, 2);
        let permits = [usage.connection(ip("10.0.0.1")).unwrap(), usage.connection(ip("10.0.0.2")).unwrap()];
        assert_eq!(usage.connection(ip("10.0.0.3")).err(), Some(Limit::MaxConnections));
        assert_eq!(usage.addresses.connections().len(), 2);
        drop(permits);
        assert!(usage.addresses.connections().is_empty());
        assert_eq!(usage.connections.used(), 0);
    }
}
