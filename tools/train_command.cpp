// SPDX-License-Identifier: Apache-2.0
// uniep train: a small MoE language model on a text, the same losses on any ranks and schedule.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numbers>
#include <numeric>
#include <set>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "commands.hpp"
#include "io/tensor_file.hpp"
#include "layer/run_case.hpp"
#include "train/checkpoint.hpp"
#include "train/trainer.hpp"

namespace uniep::tools {
namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  train::Config config;
  std::set<std::string> given;  // names of the config's options on the command line
  LayerOptions layer;
  std::string text, checkpoint, resume, json;
  std::int64_t ranks = 2, steps = 300, report_every = 20, save_every = 100;
};

// The bundled text: of an installation, beside the program; of a build, in the source tree.
std::string bundled_text() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path installed =
      (program.parent_path() / UNIEP_INSTALLED_TEXT).lexically_normal();
  if (std::filesystem::exists(installed, error)) return installed.string();
  if (std::filesystem::exists(UNIEP_SOURCE_TEXT, error)) return UNIEP_SOURCE_TEXT;
  throw_invalid("the bundled text is neither {} nor {}; name a text with --text FILE",
                quote(installed.string()), quote(UNIEP_SOURCE_TEXT));
}

// The state to start from. Options that are not given are the checkpoint's; others must agree.
train::ModelState resume(const Flags& f, std::uint64_t& text_hash) {
  train::ModelState state = train::load_checkpoint(f.resume, text_hash);
  const auto check = [&](const std::string& name, auto wanted, auto stored) {
    if (f.given.contains(name) && wanted != stored) {
      throw_invalid("--{} is {}, but checkpoint {} was trained with {}; leave it out or use {}",
                    name, wanted, quote(f.resume), stored, stored);
    }
  };
  for (const train::ConfigField& field : train::config_fields()) {
    check(field.name, f.config.*field.value, state.config.*field.value);
  }
  check("learning-rate", f.config.learning_rate, state.config.learning_rate);
  if (state.step > f.steps) {
    throw_invalid("--steps is {}, but checkpoint {} has done {}; give at least as many", f.steps,
                  quote(f.resume), state.step);
  }
  return state;
}

double bits(double nats) { return nats / std::numbers::ln2; }

void print_load(Report& report, const train::Config& config,
                const std::vector<std::int64_t>& load) {
  constexpr std::int64_t kMostColumns = 16;
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const auto row =
        std::span(load).subspan(train::count(layer * config.experts), train::count(config.experts));
    const auto total = static_cast<double>(std::accumulate(row.begin(), row.end(), 0LL));
    const auto percent = [&](std::int64_t n) { return 100.0 * static_cast<double>(n) / total; };
    const auto [low, high] = std::minmax_element(row.begin(), row.end());
    report.print("  layer {:<2} {:5.1f} to {:5.1f} %", layer, percent(*low), percent(*high));
    for (std::int64_t e = 0; config.experts <= kMostColumns && e < config.experts; ++e) {
      report.print("{} {:5.1f}", e == 0 ? " :" : "", percent(row[train::count(e)]));
    }
    report.print("\n");
  }
}

// A run's lines on standard output and its JSON, as it goes on.
class Progress {
 public:
  Progress(const Flags& flags, const train::ModelState& state, const train::Text& text,
           const std::string& text_path, const Schedule& schedule)
      : flags_(flags),
        config_(state.config),
        text_(text),
        text_path_(text_path),
        schedule_(to_string(schedule)),
        first_step_(state.step),
        report_(flags.json) {}

  void start() {
    const train::Config& c = config_;
    report_.print("text: {} bytes, the last {} of them held out\n", text_.bytes.size(),
                  text_.held_out().size());
    report_.print(
        "model: {} MoE layers, hidden {}, ffn {}, {} experts, topk {}, context {}; {} weights\n",
        c.layers, c.hidden, c.ffn, c.experts, c.topk, c.context,
        train::dense_size(c) + c.layers * c.experts * 3 * c.hidden * c.ffn);
    report_.print("run: {} steps after {}, of {} x {} bytes, {} ranks, {}\n",
                  flags_.steps - first_step_, first_step_, c.batch, c.sequence, flags_.ranks,
                  schedule_);
    report_.print("{:>7} {:>14} {:>9} {:>10}\n", "step", "loss, bit/byte", "balance", "tokens/s");
    started_ = reported_ = trained_ = Clock::now();
  }

  void step(const train::StepResult& result) {
    trained_ = Clock::now();
    steps_.push_back(
        {{"step", result.step}, {"loss_nats", result.loss}, {"balance", result.balance}});
    if (result.step % flags_.report_every != 0 && result.step != flags_.steps && result.step != 1) {
      return;
    }
    report_.print("{:>7} {:>14.4f} {:>9.4f} {:>10.0f}\n", result.step, bits(result.loss),
                  result.balance, tokens_a_second(result.step - reported_step_, reported_));
    std::fflush(stdout);
    reported_ = trained_;
    reported_step_ = result.step;
  }

  void finish(const train::ModelState& state, const train::Evaluation& held_out) {
    const double unigram = train::unigram_entropy(text_.held_out());
    const double order1 = train::order1_entropy(text_.held_out());
    const double seconds = std::chrono::duration<double>(trained_ - started_).count();
    const double speed = tokens_a_second(state.step - first_step_, started_);
    const auto print = [this](const char* what, double value) {
      report_.print("  {:<44} {:7.4f}\n", what, value);
    };
    report_.print("\non the {} held-out bytes, bits a byte:\n", text_.held_out().size());
    print("this model", bits(held_out.loss));
    print("this model, outputs of the MoE layers zero", bits(held_out.loss_without_experts));
    print("entropy of a byte, given the one before", order1);
    print("entropy of a byte", unigram);
    report_.print("(entropies counted on these very bytes)\n\n");
    report_.print("share of choices on them, an expert:\n");
    print_load(report_, config_, held_out.load);
    if (state.step > first_step_) {
      report_.print("\n{} steps in {:.1f} s, {:.0f} tokens/s\n", state.step - first_step_, seconds,
                    speed);
    }
    report_.print("loss hash {:016x} after {} steps\n", state.loss_hash, state.step);
    nlohmann::json sizes{{"learning_rate", config_.learning_rate}};
    for (const train::ConfigField& field : train::config_fields()) {
      sizes[field.name] = config_.*field.value;
    }
    report_.write({{"schema", 1},
                   {"config", sizes},
                   {"text",
                    {{"path", text_path_},
                     {"bytes", text_.bytes.size()},
                     {"hash", fmt::format("{:016x}", text_.hash)},
                     {"held_out_bytes", text_.held_out().size()}}},
                   {"ranks", flags_.ranks},
                   {"schedule", schedule_},
                   {"step", state.step},
                   {"steps", steps_},
                   {"held_out",
                    {{"bits_per_byte", bits(held_out.loss)},
                     {"bits_per_byte_moe_zeroed", bits(held_out.loss_without_experts)},
                     {"unigram_entropy", unigram},
                     {"order1_entropy", order1},
                     {"expert_load", held_out.load}}},
                   {"seconds", seconds},
                   {"tokens_per_s", speed},
                   {"loss_hash", fmt::format("{:016x}", state.loss_hash)}});
    report_.publish();
  }

 private:
  [[nodiscard]] double tokens_a_second(std::int64_t steps, Clock::time_point since) const {
    const double seconds = std::chrono::duration<double>(trained_ - since).count();
    return static_cast<double>(steps * config_.batch * config_.sequence) / std::max(seconds, 1e-9);
  }

  const Flags& flags_;
  const train::Config config_;
  const train::Text& text_;
  const std::string text_path_, schedule_;
  const std::int64_t first_step_;
  std::int64_t reported_step_ = first_step_;
  Report report_;
  nlohmann::json steps_ = nlohmann::json::array();
  Clock::time_point started_, reported_, trained_;
};

void check_checkpoint_path(const Flags& f) {
  if (f.checkpoint == "-") {
    throw_invalid("--checkpoint is '-', but one cannot go to standard output; give it a name");
  }
  check_distinct(f.checkpoint, f.json, "--checkpoint");
  check_distinct(f.checkpoint, f.text, "--checkpoint", "--text");
  // Refuses a bad path before the work, not after it.
  OutputFile("checkpoint", f.checkpoint);
}

int run_train(const Flags& f) {
  train::TrainOptions options;
  options.schedule = cpu_run_options(f.layer, "train").schedule;
  options.wait_bound = std::chrono::seconds(f.layer.timeout);
  options.num_ranks = static_cast<int>(f.ranks);
  options.steps = f.steps;
  const bool saves = !f.checkpoint.empty();
  if (saves) check_checkpoint_path(f);
  std::uint64_t text_hash = 0;
  train::ModelState state =
      f.resume.empty() ? train::make_model_state(f.config) : resume(f, text_hash);
  const std::string path = f.text.empty() ? bundled_text() : f.text;
  const train::Text text = train::load_text(path, state.config);
  if (!f.resume.empty() && text_hash != text.hash) {
    throw_invalid(
        "text {} is not the one that checkpoint {} was trained on: its hash is {:016x}, not "
        "{:016x}",
        quote(path), quote(f.resume), text.hash, text_hash);
  }
  Progress progress(f, state, text, path, options.schedule);
  options.on_start = [&] { progress.start(); };
  options.after_step = [&](const train::ModelState& now, const train::StepResult& result) {
    progress.step(result);
    if (saves && (now.step % f.save_every == 0 || now.step == f.steps)) {
      train::save_checkpoint(f.checkpoint, now, text);
    }
  };
  if (saves && state.step == f.steps) train::save_checkpoint(f.checkpoint, state, text);
  const train::Evaluation held_out = train::train(state, text, options);
  progress.finish(state, held_out);
  return 0;
}

}  // namespace

void add_train(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("train", "train a small MoE language model on a text");
  command->add_option("--text", flags->text, "text to learn, any bytes; else the bundled one")
      ->type_name("FILE");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks; the losses do not change");
  add_number(*command, "--steps", flags->steps, 0, 1'000'000'000,
             "steps in all, those of a resumed run included");
  std::vector<std::string> names;
  for (const train::ConfigField& field : train::config_fields()) {
    names.emplace_back(field.name);
    add_number(*command, fmt::format("--{}", field.name), flags->config.*field.value, field.low,
               field.high, field.help);
  }
  names.emplace_back("learning-rate");
  add_real(*command, "--learning-rate", flags->config.learning_rate, 1e-9, 1,
           "highest step size of AdamW");
  command
      ->add_option("--checkpoint", flags->checkpoint,
                   "file (safetensors) to keep the whole state in, replaced as training goes on")
      ->type_name("FILE");
  add_number(*command, "--save-every", flags->save_every, 1, 1'000'000'000,
             "steps between checkpoints; the last step always makes one");
  command
      ->add_option("--resume", flags->resume,
                   "checkpoint to go on from, on any ranks and schedule: same losses; sizes that "
                   "are not given are its own")
      ->type_name("FILE");
  add_number(*command, "--report-every", flags->report_every, 1, 1'000'000'000,
             "steps between lines of the table");
  add_layer_options(*command, flags->layer);
  command->remove_option(command->get_option("--processes"));  // ranks are threads here
  add_json_option(*command, flags->json, "all losses and results");
  command->callback([&run, flags, command, names] {
    for (const std::string& name : names) {
      if (command->get_option(fmt::format("--{}", name))->count() > 0) flags->given.insert(name);
    }
    run = [flags] { return run_train(*flags); };
  });
}

}  // namespace uniep::tools
