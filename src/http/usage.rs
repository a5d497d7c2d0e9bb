//! What is taken of the limits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::budget::{Budget, Taken};
use super::gathered::counted;
use super::limits::Limits;
use super::refusal::Refusals;
use crate::telemetry::limits::{Limit, LimitMetrics};
use crate::telemetry::metrics::Metrics;

/// So many bytes of an answer are held though there be no room: as often as there are requests.
pub(super) const HELD_ANYWAY: usize = 64 << 10;

/// What is taken of the limits at the moment: one for a process, whatever is loaded again meanwhile.
pub struct Usage {
    /// Requests that are being dealt with.
    pub requests: Arc<Budget>,
    /// Requests that wait for another's attempt.
    pub waiting: Arc<Budget>,
    /// Bytes of bodies in memory.
    pub memory: Arc<Budget>,
    /// Bytes of bodies in temporary files.
    pub disk: Arc<Budget>,
    connections: Arc<Budget>,
    addresses: Arc<Addresses>,
    /// Connections that have no place are told so.
    pub(super) refusals: Refusals,
    metrics: Arc<LimitMetrics>,
}

/// A place among the connections. Dropped, it is free.
pub struct Place {
    _taken: Taken,
    addresses: Arc<Addresses>,
    /// Nothing while nobody knows whose it is.
    network: Option<Network>,
}

struct Addresses {
    most: AtomicU64,
    connections: Mutex<HashMap<Network, u64>>,
}

/// What one client may be expected to have: an IPv4 address, or 64 bits of an IPv6 address.
type Network = u64;

impl Usage {
    /// Nothing is taken yet.
    #[must_use]
    pub fn new(limits: &Limits, metrics: &Metrics) -> Arc<Self> {
        let metrics = metrics.limits();
        let budget = |limit, most| Budget::new(limit, most, &metrics);
        Arc::new(Self {
            requests: budget(Limit::MaxRequests, limits.max_requests),
            waiting: budget(Limit::MaxWaiting, limits.max_waiting),
            memory: budget(Limit::MaxBufferedMemory, limits.max_buffered_memory),
            disk: budget(Limit::MaxBufferedDisk, limits.max_buffered_disk),
            connections: budget(Limit::MaxConnections, limits.max_connections),
            addresses: Arc::new(Addresses {
                most: AtomicU64::new(limits.max_connections_per_address),
                connections: Mutex::default(),
            }),
            refusals: Refusals::new(),
            metrics,
        })
    }

    /// Changes how much there may be of everything. What was taken stays taken.
    pub fn allow(&self, limits: &Limits) {
        self.requests.allow(limits.max_requests);
        self.waiting.allow(limits.max_waiting);
        self.memory.allow(limits.max_buffered_memory);
        self.disk.allow(limits.max_buffered_disk);
        self.connections.allow(limits.max_connections);
        self.addresses.most.store(limits.max_connections_per_address, Ordering::Relaxed);
    }

    /// Counts the bytes of a body that is there already in `memory` until nothing refers to them; nothing where there is no
    /// room for them. What is small is not counted: there are as many as requests at most.
    #[must_use]
    pub fn hold(memory: &Arc<Budget>, body: Bytes) -> Option<Bytes> {
        if body.len() <= HELD_ANYWAY {
            return Some(body);
        }
        let taken = memory.take(body.len() as u64)?;
        Some(counted(body, taken))
    }

    /// Counts that a limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.metrics.exceeded(limit);
    }

    /// Takes a place for a connection from this address, or says what stands against it.
    pub fn connection(&self, ip: IpAddr) -> Result<Place, Limit> {
        let Some(taken) = self.connections.take(1) else { return Err(Limit::MaxConnections) };
        let network = network(ip);
        if self.addresses.enter(network) {
            return Ok(Place { _taken: taken, addresses: Arc::clone(&self.addresses), network: Some(network) });
        }
        self.exceeded(Limit::MaxConnectionsPerAddress);
        Err(Limit::MaxConnectionsPerAddress)
    }
}

impl Usage {
    /// Takes a place for a connection of which a proxy is about to say whose it is, or says what stands against it.
    pub(super) fn proxied(&self) -> Result<Place, Limit> {
        let Some(taken) = self.connections.take(1) else { return Err(Limit::MaxConnections) };
        Ok(Place { _taken: taken, addresses: Arc::clone(&self.addresses), network: None })
    }

    /// The same place, for who turns out to be at this address; or says what stands against it.
    pub(super) fn known(&self, mut place: Place, ip: IpAddr) -> Result<Place, Limit> {
        let network = network(ip);
        if place.network.is_none() {
            if !self.addresses.enter(network) {
                self.exceeded(Limit::MaxConnectionsPerAddress);
                return Err(Limit::MaxConnectionsPerAddress);
            }
            place.network = Some(network);
        }
        Ok(place)
    }
}

impl Addresses {
    fn enter(&self, network: Network) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        match self.connections().entry(network) {
            Entry::Occupied(entry) if *entry.get() >= most => false,
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

    fn leave(&self, network: Network) {
        if let Entry::Occupied(mut entry) = self.connections().entry(network) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<Network, u64>> {
        // Nothing that is done under this lock can leave it half done.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(network) = self.network {
            self.addresses.leave(network);
        }
    }
}

fn network(ip: IpAddr) -> Network {
    match ip.to_canonical() {
        // As if in ::/64, where no other address is a client's.
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
    fn a_network_has_its_places_and_no_other_ones() {
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
    fn what_is_refused_and_what_has_ended_leaves_nothing_behind() {
        let usage = usage(2, 2);
        let places = [usage.connection(ip("10.0.0.1")).unwrap(), usage.connection(ip("10.0.0.2")).unwrap()];
        assert_eq!(usage.connection(ip("10.0.0.3")).err(), Some(Limit::MaxConnections));
        assert_eq!(usage.addresses.connections().len(), 2);
        drop(places);
        assert!(usage.addresses.connections().is_empty());
        assert_eq!(usage.connections.taken(), 0);
    }
}
