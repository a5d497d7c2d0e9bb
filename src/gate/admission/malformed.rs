//! The answers to requests whose head no upstream may see. Where one has a key, its answer says how that fared.

use crate::gate::Gate;
use crate::gate::answer::Reply;
use crate::gate::request::RefusedHead;
use crate::http::fault::Fault;
use crate::http::problem::Problem;
use crate::http::server::MalformedHead;
use crate::idempotency::media;
use crate::idempotency::record::RequestId;
use crate::telemetry::outcome::Code;

impl Gate {
    /// Where the request could be read. Its connection ends with the answer.
    pub(in crate::gate) fn reply_to_head(&self, RefusedHead { problem, parts }: RefusedHead, id: RequestId) -> Reply {
        let has_key = self.key_places.has_key(&parts.method, &parts.uri, &parts.headers);
        self.reply_to_malformed(problem, has_key, id).last()
    }

    /// Where the request could not be read, or is too large.
    pub(in crate::gate) fn reply_to_fault(&self, fault: Fault, known: MalformedHead<'_>, id: RequestId) -> Reply {
        let problem = Problem::new(fault.code(), fault.to_string());
        match known {
            MalformedHead::Raw(head) if fault == Fault::CONTROL_CHARACTER && self.key_places.has_odd_key(head) => {
                let detail = "the key has a control character: a key has visible ASCII characters only, and no spaces";
                self.reply_to_malformed(Problem::new(Code::KeyInvalid, detail), true, id)
            }
            MalformedHead::Raw(head) => self.reply_to_malformed(problem, self.key_places.may_have_key(head), id),
            MalformedHead::Head(head) => {
                let has_key = self.key_places.has_key(&head.method, &head.uri, &head.headers);
                let reply = self.reply_to_malformed(problem, has_key, id);
                if media::is_grpc_call(&head.method, &head.headers) { reply.into_call() } else { reply }
            }
        }
    }

    fn reply_to_malformed(&self, problem: Problem, has_key: bool, id: RequestId) -> Reply {
        let reply = Reply::problem(problem, None, id);
        if has_key { self.keyed(reply) } else { reply }
    }
}
